"""Recomputation: of single tensors where that is cheap (light), and of whole modules.

While a period is recorded, `finder` looks for a formula for every saved tensor: along the graph (`formulas`, `ways`,
`origins`), by the operations that are known (`operations`; `fused` does several at once). `trials` sees whether it
gives the same bits, and what it takes. With `replays` no formula is looked for: a tensor is made again by the operators
that made it, which the `tape` has recorded, with the kernels of the program's `choices`. What the plan then recomputes
is held in the graph as `dropped` tensors.
`regions` puts PyTorch's own checkpoint around whole modules, of which all are `exact`ly PyTorch's own and `watch` has
seen that they can be repeated; a forward that is repeated finds things `as_it_was`, its `arguments` included.
"""
