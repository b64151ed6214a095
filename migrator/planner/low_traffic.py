"""How much of the memory bus a plan uses, and whether that is low traffic. Pure functions on plain data."""

from __future__ import annotations

from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import Plan

LOW_TRAFFIC = 1 / 12
"""Of what both lanes give together: who moves no more a second need not move less for others' sake.

Beside 100 GB/s of copies a GPT that moved 29 GB/s took 12% of theirs, one at 13 GB/s 5%; not to move cost it 1.4%.
"""


def is_low_traffic(plan: Plan, links: Links, seconds: float) -> bool:
    """Whether a plan, carried out every so many seconds, takes little of the bus.

    Parameters
    ----------
    links
        The lanes, also where others leave only a part of them: what counts is what they usually give.
    """
    usual = links.alone
    return crossing(plan, links) <= LOW_TRAFFIC * min(usual.both, usual.d2h + usual.h2d) * seconds


def crossing(plan: Plan, links: Links) -> int:
    """Bytes an iteration that cross the bus: those that move, there and back; again what goes on to drives from there.

    What drives take from HBM, and give to it, does not.
    """
    past = sum(group.nbytes for group in plan.groups if group.tier == "nvme") if links.direct else 0
    by_bus = plan.moved_bytes - past
    return 2 * (by_bus + max(0, by_bus - links.dram))
