"""Sublinear memory (Chen et al., 2016, algorithm 3): gradient checkpointing with a byte budget per segment.

The paper walks the graph, adds up bytes, and ends a segment where the sum exceeds a bound ``B``; each segment is
recomputed from its inputs, and ``B`` is searched for the plan that serves best. Segments here are modules, as those
are what can be recomputed from outside: a walk from the outermost modules inwards takes every module that
saves at most ``b`` bytes, and looks into those that save more. So a segment never spans two modules unless a third
contains both. What lies in no segment is kept.

Of all bounds that tell plans apart (the paper tries a grid around ``sqrt(x * y)``), the one is taken that fits
the budget with the least time spent on recomputation; if none fits, the one with the lowest peak.
"""

from __future__ import annotations

import numpy as np

from torch_tiers.migrator.links import Links
from torch_tiers.migrator.plan import Plan
from torch_tiers.migrator.planner.effects import effect
from torch_tiers.migrator.planner.intervals import Bytes, room
from torch_tiers.migrator.planner.schedule import fit, occupied
from torch_tiers.migrator.trace import Region, Trace

BOUNDS = 64  # at most as many are tried


def plan(trace: Trace, budget: int, links: Links) -> Plan:
    """Search the bound and recompute the segments it makes."""
    free = room(trace, budget)
    best: tuple[float, float, tuple[Region, ...]] | None = None
    for bound in _bounds(trace):
        chosen = segments(trace, bound)
        over = int((_bytes_in_hbm(trace, chosen) - free).max(initial=0))
        found = (max(0.0, over), sum(region.seconds for region in chosen), chosen)
        if best is None or found[:2] < best[:2]:
            best = found
    return fit("checkpoint", trace, budget, (), regions=[region.path for region in best[2]] if best else ())


def segments(trace: Trace, bound: int) -> tuple[Region, ...]:
    """The outermost regions that save at most `bound` bytes, but more than their inputs, in the order of births."""
    chosen: list[Region] = []
    for region in sorted(trace.regions, key=lambda region: (region.begin, -region.end)):
        within = bool(chosen) and region.begin < chosen[-1].end
        if not within and region.input_bytes < saved_within(trace, region) <= bound:
            chosen.append(region)
    return tuple(chosen)


def saved_within(trace: Trace, region: Region) -> int:
    """Bytes of the storages that the region's forward saved."""
    return sum(trace.storage_bytes[ident] for ident in {site.storage for site in trace.sites_of(region)})


def _bounds(trace: Trace) -> list[int]:
    sizes = sorted({saved_within(trace, region) for region in trace.regions})
    picked = np.unique(np.linspace(0, len(sizes) - 1, min(BOUNDS, len(sizes))).astype(int)) if sizes else ()
    return [0, *(sizes[int(k)] for k in picked)]


def _bytes_in_hbm(trace: Trace, chosen: tuple[Region, ...]) -> Bytes:
    """Bytes held and bytes recomputed, by stretch."""
    outcome = effect(trace, (), [region.path for region in chosen])
    return occupied(outcome.held.values(), trace.positions) + outcome.again
