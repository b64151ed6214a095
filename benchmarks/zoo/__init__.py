"""How fast are other people's programs in part of their memory, and are their losses the same bit for bit?

``python -m benchmarks.zoo --out DIR --gpus 4 --budgets 75 60 45 --steps 60 --limit 1500``

They are plain PyTorch programs as their fields write them, which know nothing of tiers.

A module of `PROGRAMS` has ``make(size, device, checkpoint)``, which builds a `benchmarks.zoo.program.Program`.
"""
