"""Plans as a picture, with matplotlib (extra ``plot``)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.sizes import GiB, MiB, format_size
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.planning.compare import Candidate, Outcomes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NARROW = 0.03  # of the step: a part that is shorter gets a line, and no word


def draw(trace: Trace, budget: int, outcomes: Outcomes, path: Path) -> None:
    """Draw the plans' memory over the step in one chart, against the budget, and below it their moves as bars.

    The legend has each plan's step and peak. Forward, backward and what follows are marked as the first plan has them.
    """
    from matplotlib.figure import Figure  # the object, not pyplot, which would look for a display

    found = [(name, outcome) for name, outcome in outcomes.items() if isinstance(outcome, Candidate)]
    timed = bool(trace.times)
    moved = [(name, outcome) for name, outcome in found if timed and outcome.result.moves]
    figure = Figure(figsize=(11, 5 + 0.5 * len(moved)), layout="constrained")
    rows = figure.subplots(2, 1, sharex=True, height_ratios=(5, max(0.5 * len(moved), 0.1))) if moved else None
    memory: Axes = figure.add_subplot() if rows is None else rows[0]
    highest = max(budget, *(int(outcome.result.hbm.max(initial=0)) for _, outcome in found))
    unit, unit_name = (GiB, "GiB") if highest >= GiB else (MiB, "MiB")
    colours = {name: f"C{number}" for number, (name, _) in enumerate(found)}
    ends = [_edges(outcome, timed=timed) for _, outcome in found]
    for (name, outcome), edges in zip(found, ends, strict=True):
        peak = f"peak {format_size(outcome.result.peak['hbm'])}"
        label = f"{name}: step {outcome.result.seconds * 1e3:.1f} ms, {peak}" if timed else f"{name}: {peak}"
        memory.stairs(outcome.result.hbm / unit, edges, baseline=None, color=colours[name], label=label, linewidth=1.2)
    if trace.others:
        others = np.array(trace.others) / unit
        memory.stairs(others, ends[0], baseline=None, color="grey", label="other than saved tensors")
    memory.axhline(budget / unit, color="red", linestyle="--", label=f"budget {format_size(budget)}")
    end = max(float(edges[-1]) for edges in ends)
    memory.set(ylabel=f"{unit_name} of hbm", ylim=(0, 1.1 * highest / unit), xlim=(0, end))
    memory.grid(alpha=0.3)
    _mark(memory, trace, ends[0], end)
    figure.legend(loc="outside upper left", fontsize="small", ncols=2, frameon=False)
    below = memory
    if rows is not None:
        below = rows[1]
        _draw_moves(below, moved, colours)
    below.set_xlabel("ms" if timed else "position")
    try:
        figure.savefig(path)
    except OSError as error:
        raise TiersError(f"{path} cannot be written: {error.strerror}") from error


def _edges(outcome: Candidate, *, timed: bool) -> NDArray[Any]:
    """Where the stretches begin, and where the last one ends: with the step."""
    if not timed:
        return np.arange(len(outcome.result.hbm) + 1, dtype=np.float64)
    return np.concatenate(([0.0], outcome.result.clock, [outcome.result.seconds])) * 1e3


def _mark(memory: Axes, trace: Trace, edges: NDArray[Any], end: float) -> None:
    """Mark the parts of the step; the last is the optimizer's, with all that follows the last saved tensor's use."""
    last = max((use for site in trace.sites for use in site.uses), default=trace.turn)
    bounds = [0.0, float(edges[trace.turn + 1]), float(edges[last + 1]), float(edges[-1])]
    for part, begin, until in zip(("forward", "backward", "optimizer"), bounds, bounds[1:], strict=False):
        if begin:
            memory.axvline(begin, color="black", linewidth=0.8, linestyle=":")
        if until - begin > _NARROW * end:
            memory.text((begin + until) / 2, 0.98, part, transform=memory.get_xaxis_transform(), ha="center", va="top")


def _draw_moves(lanes: Axes, moved: list[tuple[str, Candidate]], colours: dict[str, str]) -> None:
    """Draw when groups leave and return, two rows a plan."""
    for number, (name, outcome) in enumerate(moved):
        for row, (start, end) in ((2 * number, (0, 1)), (2 * number + 1, (2, 3))):
            bars = [(move[start] * 1e3, (move[end] - move[start]) * 1e3) for move in outcome.result.moves if move[end]]
            # The edge keeps a bar in sight that is shorter than a pixel.
            lanes.broken_barh(bars, (row - 0.4, 0.8), color=colours[name], edgecolor=colours[name], linewidth=0.8)
    words = [f"{name} {way}" for name, _ in moved for way in ("out", "back")]
    lanes.set_yticks(range(len(words)), words)
    lanes.set_ylim(len(words) - 0.5, -0.5)
