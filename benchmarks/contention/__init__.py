"""How much do training and preprocessing take from each other on one host, with the monitor and without it?

``python -m benchmarks.contention --json contention.json`` takes less than ten minutes on a GPU machine;
``python -m benchmarks.contention --tiny`` runs the same code on a CPU in less than one and tells nothing.

A *cell* is one variant beside one load: ``off`` and ``on`` are tiers at a budget that forces moves, without and with
the monitor; they alternate within one session, their order turning from round to round. In a cell training runs until
nothing has changed for some steps; then it takes turns of some steps with plain PyTorch (no tiers, a process of its
own), and what the load does in the turns of each is counted. So what is compared is seconds apart: hosts that others
use change within minutes by more than what is looked for. Loads are those of `loads`.
"""
