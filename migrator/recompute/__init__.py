"""Recomputation: of single tensors by the operators that made them (light), and of whole modules.

While a period is recorded, `replays` looks on the `tape` for what makes each saved tensor again, with the kernels of
the program's `choices`. `trials` sees whether that gives the same bits, and what it takes, which counts as `verified`
from then on. What the plan then recomputes is held in the graph as `dropped` tensors.
`regions` puts PyTorch's own checkpoint around whole modules, of which all are `exact`ly PyTorch's own and `watch` has
seen that they can be repeated; a forward that is repeated finds things `as_it_was`, its `arguments` included.
"""
