"""The two clocks, host and device, and the lanes; with what the device waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torch_tiers.migrator.model.links import LANES
from torch_tiers.planning.html.axes import COLOURS, bars, blank, key
from torch_tiers.planning.html.planned import NO_PLAN, Planned
from torch_tiers.planning.html.section import Section
from torch_tiers.planning.html.thin import extremes, shares
from torch_tiers.planning.html.watched import Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BUCKETS = 300
_COLUMNS = 500


def lanes(of: Planned | None) -> Section:
    """Return the section for a plan."""
    name, title = "lanes", "The two clocks and the lanes"
    if of is None:
        return Section(name, title, (NO_PLAN,))
    if not of.timed:
        return Section(name, title, ("The trace has no times, so it is not known what is busy when.",))
    machine, has_host = of.machine, of.trace.clocks is not None
    used = [lane for lane in LANES if machine.copies[lane]]
    rows = [*(["host"] if has_host else []), "device", *used]
    figure = blank(1.1 + 0.4 * len(rows) + (1.5 if has_host else 0))
    heights = (3, 0.9 * len(rows)) if has_host else (1,)
    charts = figure.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    longest, axes = float(of.edges[-1]), charts[-1]
    if has_host:
        charts[0].axhline(0, color="black", linewidth=0.5)
        at, ahead = 1e3 * np.array(machine.ahead).T
        picked = extremes(ahead, _BUCKETS)
        charts[0].plot(at[picked], ahead[picked], color=COLOURS["waiting"], linewidth=1)
        charts[0].set(ylabel="host ahead, ms")
        charts[0].grid(alpha=0.3)
    for row, what in enumerate(rows):
        if what in LANES:
            copies = [(1e3 * begin, 1e3 * end) for begin, end in machine.copies[what]]
            bars(axes, row, copies, longest, color=COLOURS["dram"])
        else:
            _columns(axes, row, _busy(of, what), longest)
    axes.set(xlabel=of.across, xlim=(0, longest), ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(range(len(rows)), rows)
    key(
        charts[0],
        [
            (said, COLOURS[colour])
            for said, colour, there in (
                ("computes, issues", "hbm", True),
                ("handles groups", "moving", machine.calling),
                ("copies", "dram", used),
                ("waits for a lane", "stall", any(machine.for_lane.values())),
                ("waits for the host", "waiting", machine.for_host),
            )
            if there
        ],
    )
    return Section(name, title, _said(of, used, has_host), figure)


def _said(of: Planned, used: list[str], has_host: bool) -> tuple[str, ...]:
    said = [
        "As the last plan was simulated. What takes host or device a part of a column's time fills that part of it."
    ]
    if not has_host:
        said.append("Host and device are one here, so there is one clock.")
    said += [f"The device waits {1e3 * of.result.stalls[lane]:.1f} ms for {lane}." for lane in used]
    if not used:
        said.append("Nothing moves, so no lane is busy.")
    return tuple(said)


def _busy(of: Planned, row: str) -> dict[str, list[Span]]:
    """What host or device do when, by colour."""
    machine = of.machine
    if row == "host":
        return {"hbm": machine.issuing, "moving": machine.calling}
    stalls = [span for spans in machine.for_lane.values() for span in spans]
    calling = [] if of.trace.clocks is not None else machine.calling
    return {"hbm": machine.computing, "moving": calling, "stall": stalls, "waiting": machine.for_host}


def _columns(axes: Axes, row: int, does: dict[str, list[Span]], longest: float) -> None:
    """Draw what is done in a row, each column as high as the part of its time that it takes.

    A wait may be shorter than a column is wide, and as wide as a column many of them would look like one long wait.
    """
    at = np.linspace(0, longest, _COLUMNS + 1)
    low = np.full(_COLUMNS + 1, row + 0.4)
    for colour, spans in does.items():
        share = shares([(1e3 * begin, 1e3 * end) for begin, end in spans], longest, _COLUMNS)
        if share.any():
            high = low - 0.8 * np.concatenate((share, share[-1:]))
            # Columns like those before them go without saying: most are full.
            new = (np.diff(low, prepend=0) != 0) | (np.diff(high, prepend=0) != 0)
            new[-1] = True
            axes.fill_between(at[new], low[new], high[new], step="post", color=COLOURS[colour], linewidth=0)
            low = high
