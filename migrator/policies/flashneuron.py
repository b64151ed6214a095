"""FlashNeuron, phase 1 (Bae et al., FAST'21, "Offloading Scheduler"): tensors are selected in linear order.

They go to the drive, past the host's memory, as in the paper; where there is no such way, wherever there is room.
"""

from __future__ import annotations

from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.schedule import fit
from torch_tiers.migrator.planner.sizes import least_room, look_ahead


def plan(trace: Trace, budget: int, links: Links) -> Plan:
    """Move storages in the order of their creation until what stays fits.

    The paper selects until ``sum(unselected) <= memory - resident - largest working set``; that
    right-hand side is the least room of the iteration. Moving needs HBM too, for the groups that are under
    way: the look-ahead comes off the room as soon as anything moves. Phase 2 (compression) is not part of it.
    """
    room = least_room(trace, budget)
    stays, largest = trace.saved_bytes, 0
    moved: set[int] = set()
    for life in trace.lifetimes:
        if stays + look_ahead(largest, room) <= room:
            break
        moved.add(life.ident)
        stays -= life.nbytes
        largest = max(largest, life.nbytes)
    return fit("flashneuron", trace, budget, moved, tiers=dict.fromkeys(moved, "nvme") if links.direct else None)
