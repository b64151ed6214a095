"""Memory over the iteration, stacked by what it is for, against the budget."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from torch_tiers.allocator.sizes import format_size
from torch_tiers.migrator.planner.intervals import Bytes
from torch_tiers.migrator.planner.schedule import occupied_by
from torch_tiers.planning.html.axes import COLOURS, blank, unit_of
from torch_tiers.planning.html.planned import NO_PLAN, Planned
from torch_tiers.planning.html.section import Section
from torch_tiers.planning.html.thin import extremes

OTHER, STAY, MOVE, AGAIN = "all else", "saved tensors that stay", "saved tensors that move", "recomputed"

_BUCKETS = 250
_COLOURS = {
    OTHER: COLOURS["other"],
    STAY: COLOURS["hbm"],
    MOVE: COLOURS["moving"],
    AGAIN: COLOURS["recomputed"],
}


def classes(of: Planned) -> Mapping[str, Bytes]:
    """Return the bytes in HBM in each stretch, by what they are for; together they are what the simulator tells."""
    trace, hbm = of.trace, of.result.hbm
    moving = {key for group in of.plan.groups for key in group.sites}
    staying = [held for held in of.effect.held.values() if held.holders[0].key not in moving]
    # What backward never asks for is there until the end.
    ends = [held.leave if any(site.uses for site in held.holders) else trace.positions - 1 for held in staying]
    windows = ((held.birth, end, held.nbytes) for held, end in zip(staying, ends, strict=True))
    stay = occupied_by(windows, trace.positions)
    other = np.array(trace.others, dtype=np.int64) if trace.others else np.zeros_like(hbm)
    return {OTHER: other, STAY: stay, MOVE: hbm - other - stay - of.effect.again, AGAIN: of.effect.again}


def memory(of: Planned | None, budget: int) -> Section:
    """Return the section for a plan, and the budget of the run in bytes."""
    name, title = "memory", "Memory over the iteration"
    if of is None:
        return Section(name, title, (NO_PLAN,))
    parts, total, edges = classes(of), of.result.hbm, of.edges
    picked = extremes(total, _BUCKETS)
    at = np.concatenate((edges[picked], edges[-1:]))
    unit, unit_name = unit_of(max(budget, int(total.max(initial=0))))
    figure = blank(3.6)
    axes = figure.add_subplot()
    heights = {
        part: np.concatenate((nbytes[picked], nbytes[picked[-1:]])) / unit
        for part, nbytes in parts.items()
        if nbytes.any()
    }
    axes.stackplot(
        at, *heights.values(), labels=[*heights], colors=[_COLOURS[part] for part in heights], step="post", linewidth=0
    )
    axes.axhline(budget / unit, color=COLOURS["budget"], linestyle="--", label="budget")
    axes.set(xlabel=of.across, ylabel=f"{unit_name} of hbm", xlim=(edges[0], max(edges[-1], edges[0] + 1e-9)))
    axes.set_ylim(0, 1.08 * max(budget, int(total.max(initial=0)), 1) / unit)
    figure.legend(loc="outside upper right", ncols=len(heights) + 1, frameon=False)
    said = [f"As the last plan was simulated; its peak is {format_size(int(total.max(initial=0)))} of hbm."]
    if not of.trace.others:
        said.append("The trace does not tell what else lies in hbm.")
    return Section(name, title, tuple(said), figure)
