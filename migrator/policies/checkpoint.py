"""Sublinear memory (Chen et al., 2016, algorithm 3): gradient checkpointing with a byte budget per segment.

The paper walks the graph, adds up bytes, and ends a segment where the sum exceeds a bound ``B``; each segment is
recomputed from its inputs, and ``B`` is searched for the plan that serves best. Segments here are modules: a walk from
the outermost inwards takes every module that saves at most ``b`` bytes, and looks into those that save more. What lies
in no segment is kept, and so is what a segment begins with.

Of all bounds that tell plans apart (the paper tries a grid around ``sqrt(x * y)``), the one is taken that fits
the budget with the least time spent on recomputation; if none fits, the one with the lowest peak.
"""

from __future__ import annotations

from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.blocks import blocks, bounds, segments, within
from torch_tiers.migrator.planner.effects import effect
from torch_tiers.migrator.planner.intervals import room
from torch_tiers.migrator.planner.schedule import fit, occupied

RECOMPUTES = True

BOUNDS = 64  # at most as many are tried


def plan(trace: Trace, budget: int, links: Links) -> Plan:
    """Search the bound and recompute the segments it makes."""
    free, found = room(trace, budget), blocks(trace)
    best: tuple[int, float, frozenset[int]] | None = None
    for bound in (0, *bounds(found, BOUNDS)):
        dropped = within(trace, list(segments(found, bound)))
        outcome = effect(trace, dropped)
        in_hbm = occupied(outcome.held.values(), trace.positions) + outcome.again
        over = int((in_hbm - free).max(initial=0))
        seconds = sum(work.seconds for work in outcome.work.values())
        if best is None or (over, seconds) < best[:2]:
            best = over, seconds, dropped
    return fit("checkpoint", trace, budget, (), dropped=best[2] if best else ())
