"""What moves, and when.

Data goes one way, from folder to folder:

========================== ==========================================================================
`hooks`                    where PyTorch hands over what it saves, and asks for it again
`recording`                what one period did: a `trace`
`planner` and `policies`   from a trace, a budget and `links`: a `plan`, which `simulator` puts a time to
`learning`                 plans again where what is measured differs from what was predicted
`engine`                   carries a plan out, over `lanes`, and decides nothing
`recompute`                carries out what is recomputed
`runtime`                  holds these together over the periods of a program
`telemetry`                counts, and writes down what happened when
========================== ==========================================================================

`trace`, `timing`, `links`, `plan`, `simulator`, and all of `planner`, `policies` and `learning` are plain data and
functions of it, without torch.
"""
