"""Plans as a picture, with matplotlib (extra ``plot``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from allocator.errors import TiersError
from allocator.sizes import GiB
from migrator.trace import Trace
from tiers.planning.compare import Candidate, Outcomes


def draw(trace: Trace, budget: int, outcomes: Outcomes, path: Path) -> None:
    """Draw memory over the step against the budget, and under it the moves as bars; a column per policy."""
    from matplotlib.figure import Figure  # the object, not pyplot, which would look for a display

    found = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Candidate)}
    if not found:
        raise TiersError("there is no plan to draw")
    figure = Figure(figsize=(2 + 6 * len(found), 6), layout="constrained")
    charts = figure.subplots(2, len(found), squeeze=False, sharex="col", sharey="row", height_ratios=(3, 1))
    for column, (name, outcome) in enumerate(found.items()):
        memory, lanes = charts[0][column], charts[1][column]
        result = outcome.result
        clock = np.concatenate(([0.0], result.clock)) if trace.times else np.arange(len(result.hbm))
        memory.step(clock * (1e3 if trace.times else 1), result.hbm / GiB, where="post", label="hbm")
        if trace.others:
            memory.step(
                clock * (1e3 if trace.times else 1),
                np.array(trace.others) / GiB,
                where="post",
                color="grey",
                label="of that not saved",
            )
        memory.axhline(budget / GiB, color="red", linestyle="--", label="budget")
        memory.set_title(name)
        memory.grid(alpha=0.3)
        if trace.times:
            for row, (start, end) in ((1, (0, 1)), (0, (2, 3))):
                bars = [(move[start] * 1e3, (move[end] - move[start]) * 1e3) for move in result.moves if move[end]]
                lanes.broken_barh(bars, (row - 0.4, 0.8))
        lanes.set_yticks([0, 1], ["h2d", "d2h"])
        lanes.set_xlabel("ms" if trace.times else "position")
    charts[0][0].set(ylabel="GiB", ylim=(0, None))
    charts[0][0].legend(fontsize="small")
    try:
        figure.savefig(path)
    except OSError as error:
        raise TiersError(f"{path} cannot be written: {error.strerror}") from error
