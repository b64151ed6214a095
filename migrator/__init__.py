"""What moves, and when.

Data goes one way: `trace` (what one period did) -> `plan` (what to keep and what to move, made by
a policy of `policies/`) -> `engine` (carries the plan out and decides nothing). `hooks` is where
PyTorch hands tensors over; `runtime` holds the parts together over the periods of a program.

`trace`, `plan` and `policies` are plain data and pure functions and import no torch.
"""
