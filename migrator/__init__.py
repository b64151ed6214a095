"""What moves, and when.

Each folder imports only from those below it.

================== ==================================================================================
`runtime`          holds the others together over the iterations of a program
`saved`            the hooks: where PyTorch hands over what it saves, and asks for it again
`recording`        what one iteration did: a `model.trace`
`recompute`        makes tensors again, and tries whether that gives the same bits
`offload`          groups of tensors out of HBM and back, over `streams`; decides nothing
`tape`, `program`  the operators that run; the modules, parameters and optimizers of the program
`streams`          copies in both directions, the compute stream, and clocks
`telemetry`        counts, and writes down what happened when
`controller`       has plans made, and made anew where what is measured differs from what was predicted
`policies`         from a trace, a budget and `model.links`: a `model.plan`
`simulator`        what a plan comes to: times, and bytes per tier
`planner`          what policies share
`model`            the plain data that all of them speak of
================== ==================================================================================

`model`, `planner`, `simulator`, `policies` and `controller` are plain data and functions of it, without torch.
"""
