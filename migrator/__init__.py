"""The migrator: decides which saved tensors to keep, offload or recompute, and executes that.

Each folder imports only from those below it.

================== ==================================================================================
`runtime`          connects the others over the iterations of a program
`saved`            PyTorch's saved-tensor hooks, and what they do with each tensor
`recording`        records one iteration: a `model.trace`
`recompute`        recomputes tensors, and tries whether that gives the same bits
`offload`          offloads and prefetches groups of tensors, over `streams`; decides nothing
`weights`          streams weights that do not fit, operator by operator
`tape`, `program`  the operators that run; the modules, parameters and optimizers of the program
`streams`          copies in both directions, the compute stream, and clocks
`telemetry`        counters and the timeline
`controller`       orders plans, and others where measurements differ from predictions
`policies`         from a trace, a budget and `model.links`: a `model.plan`
`simulator`        predicts a plan's times, and bytes per tier
`planner`          the parts that policies share
`model`            the data that all of them share
================== ==================================================================================

`model`, `planner`, `simulator`, `policies` and `controller` are plain data and functions of it, without torch.
"""
