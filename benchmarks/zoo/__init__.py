"""Plain PyTorch programs as their fields write them, which know nothing of tiers, and a command that runs them with it.

A module of `PROGRAMS` has ``make(size, device, checkpoint)``, which builds a `benchmarks.zoo.program.Program`.
"""
