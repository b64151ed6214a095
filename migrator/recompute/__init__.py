"""Recomputation: saved tensors are dropped, and made again by the operators that made them.

While an iteration is recorded, `replays` looks on the `tape` for what makes each saved tensor again, with the kernels
of the program's `choices`. `trials` sees whether that gives the same bits, and what it takes, which counts as
`verified` from then on. What the plan then recomputes is held in the graph as `dropped` tensors; `checks` compares one
of them with the original now and then.
"""
