"""Measures every path between HBM, DRAM and NVMe with the arenas, lanes and stores that run.

`results` is plain data; `table`, `plot` and `links` are pure functions of it. A measured path (`host`, `gpu`, `disk`)
knows how to move bytes once, `measure` how often and for how long, `contention` what else runs meanwhile. `catalogue`
lists the paths of a machine, `machine` describes it, and `run` puts it all together.
"""
