"""Plans as a picture, with matplotlib (extra ``plot``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.sizes import GiB, MiB
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.planning.compare import Candidate, Outcomes

_ACROSS = 4  # more charts than that go into further rows


def draw(trace: Trace, budget: int, outcomes: Outcomes, path: Path) -> None:
    """Draw memory over the step against the budget, and under it the moves as bars; a chart per plan; at least one."""
    from matplotlib.figure import Figure  # the object, not pyplot, which would look for a display

    found = [(name, outcome) for name, outcome in outcomes.items() if isinstance(outcome, Candidate)]
    across = min(len(found), _ACROSS)
    down = -(-len(found) // across)
    figure = Figure(figsize=(2 + 6 * across, 6 * down), layout="constrained")
    charts = figure.subplots(2 * down, across, squeeze=False, height_ratios=(3, 1) * down)
    highest = max(budget, *(int(outcome.result.hbm.max(initial=0)) for _, outcome in found))
    unit, unit_name = (GiB, "GiB") if highest >= GiB else (MiB, "MiB")
    longest = max(outcome.result.seconds for _, outcome in found) * 1e3 if trace.times else len(trace.others) or None
    for place in range(down * across):
        memory, lanes = (charts[2 * (place // across) + row][place % across] for row in range(2))
        if place >= len(found):
            memory.set_axis_off()
            lanes.set_axis_off()
            continue
        name, outcome = found[place]
        result = outcome.result
        clock = np.concatenate(([0.0], result.clock)) * 1e3 if trace.times else np.arange(len(result.hbm))
        memory.step(clock, result.hbm / unit, where="post", label="all of hbm")
        if trace.others:
            others = np.array(trace.others) / unit
            memory.step(clock, others, where="post", color="grey", label="other than saved tensors")
        memory.axhline(budget / unit, color="red", linestyle="--", label="budget")
        memory.set(title=name, ylabel=unit_name, ylim=(0, 1.05 * highest / unit), xlim=(0, longest))
        memory.grid(alpha=0.3)
        if trace.times:
            for row, (start, end) in ((1, (0, 1)), (0, (2, 3))):
                bars = [(move[start] * 1e3, (move[end] - move[start]) * 1e3) for move in result.moves if move[end]]
                # The edge keeps a bar in sight that is shorter than a pixel.
                lanes.broken_barh(bars, (row - 0.4, 0.8), edgecolor="C0", linewidth=0.8)
        lanes.set_yticks([0, 1], ["back", "out"])
        lanes.set(xlabel="ms" if trace.times else "position", ylim=(-0.5, 1.5), xlim=(0, longest))
    charts[0][0].legend(fontsize="small")
    try:
        figure.savefig(path)
    except OSError as error:
        raise TiersError(f"{path} cannot be written: {error.strerror}") from error
