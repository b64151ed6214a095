"""The monitor: watches lanes and the host's memory bus, and tells the runtime to back off when others need it.

FlashNeuron (Bae et al., FAST'21) observed that moving tensors through host memory competes with the
input pipeline, and went past host memory for that; here it is watched while it runs. Readings of `sensors` go
through `verdict` and `migrator.runtime.backoff`, one step of which is a `Watch.tick`; `thread` runs them beside the
program, and `board` shows them to ``tiers top``.
"""
