"""Spreads groups over two paths to NVMe: directly, and through host memory. Pure functions."""

from __future__ import annotations

from collections.abc import Collection

from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.booking import Lanes
from torch_tiers.migrator.planner.intervals import Interval, inactive


def spread(trace: Trace, moved: Collection[int], links: Links) -> dict[int, str]:
    """Which of the storages that move go to NVMe, where there is a direct way: the tier by storage.

    In the order of their saves each takes the way on which it is out first, behind those before it: so a drive gets
    what would have to wait for a lane to DRAM that is full. It gets no more than it holds, nor what it would be late
    with.
    """
    tiers: dict[int, str] = {}
    if not links.direct:
        return tiers
    first: dict[int, Interval] = {}
    for idle in inactive(trace):
        if idle.storage in moved:
            first.setdefault(idle.storage, idle)
    lanes, left = Lanes(links), links.drive
    for idle in sorted(first.values(), key=lambda idle: idle.start):
        out, past = (lanes.out(idle.nbytes, idle.start, tier) for tier in ("dram", "nvme"))
        back = lanes.back(idle.nbytes, idle.stop, "nvme")
        if past.left < out.left and past.end <= back.start and idle.nbytes <= left:
            lanes.book(past)
            lanes.book(back)
            tiers[idle.storage] = "nvme"
            left -= idle.nbytes
        else:
            lanes.book(out)
    return tiers
