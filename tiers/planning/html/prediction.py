"""Predicted against measured: the time of an iteration, the peak of each tier, and what each lane carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_tiers.migrator.model.links import LANES
from torch_tiers.planning.html.axes import COLOURS, blank, unit_of
from torch_tiers.planning.html.planned import NO_PLAN, Planned
from torch_tiers.planning.html.section import Section
from torch_tiers.planning.why import Why, waiting_for_host
from torch_tiers.run_directory import by_iteration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TIERS = ("hbm", "dram", "nvme")
_PARTS = {
    "everything kept (ideal)": COLOURS["hbm"],
    "recomputing": COLOURS["recomputed"],
    "waiting for lanes": COLOURS["stall"],
    "slower beside busy lanes": COLOURS["dram"],
    "waiting for the host": COLOURS["waiting"],
    "waiting for what is streamed (measured)": COLOURS["other"],
}
Pairs = Mapping[str, tuple[float, float]]
"""Predicted and measured, by name."""


def prediction(of: Planned | None, stats: Mapping[str, Any]) -> Section:
    """Return the section for a plan, and what was counted."""
    name, title = "prediction", "Predicted and measured"
    if of is None:
        return Section(name, title, (NO_PLAN,))
    why, figure = of.why, blank(3.2)
    times, peaks, carried = figure.subplots(1, 3, width_ratios=(4, 3, 3))
    said = ["Times and transfers are of one iteration. The peak that was measured is that of the whole run."]
    if why.varies or not why.result.ideal:
        times.set_axis_off()
        cause = "sizes change from step to step" if why.varies else "the trace has no times"
        said.append(f"No time is predicted, as {cause}.")
    else:
        _times(times, why)
    moved, _ = by_iteration(stats)
    _beside(peaks, "peak", {tier: (of.result.peak[tier], stats["peak"].get(tier, 0)) for tier in _TIERS})
    _beside(carried, "carried", {lane: (of.machine.carried[lane], moved.get(lane, 0)) for lane in LANES})
    return Section(name, title, tuple(said), figure)


def parts(why: Why) -> dict[str, float]:
    """Return the seconds of the iteration that was predicted, by part."""
    result = why.result
    streamed = why.streaming + why.streaming_state
    more = (result.recomputing, sum(result.stalls.values()), result.slowed, waiting_for_host(result))
    # What the device waits for a lane it may have waited for the host with everything kept: it counts once.
    kept = max(0.0, min(result.ideal, result.seconds - sum(more)))
    return dict(zip(_PARTS, (kept, *more, streamed), strict=True))


def _times(axes: Axes, why: Why) -> None:
    bottom = 0.0
    for part, seconds in parts(why).items():
        if seconds > 5e-5:
            axes.bar(0, 1e3 * seconds, 0.6, bottom=1e3 * bottom, color=_PARTS[part], label=part)
            bottom += seconds
    highest, names = bottom, ["predicted"]
    if why.measured is not None:
        axes.bar(1, 1e3 * why.measured, 0.6, color=COLOURS["other"])
        highest, names = max(bottom, why.measured), ["predicted", "measured"]
    axes.set_xticks(range(len(names)), names)
    axes.set(title="time", ylabel="ms", xlim=(-0.5, 1.5), ylim=(0, 1.5e3 * highest))  # the legend is above the bars
    axes.legend(loc="upper left", frameon=False, fontsize="x-small")


def _beside(axes: Axes, title: str, pairs: Pairs) -> None:
    """Draw pairs of bars, without those that are both 0."""
    there = {name: pair for name, pair in pairs.items() if any(pair)}
    axes.set_title(title)
    if not there:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "nothing", ha="center", va="center", transform=axes.transAxes)
        return
    highest = max(max(pair) for pair in there.values())
    unit, unit_name = unit_of(highest)
    at = np.arange(len(there))
    for offset, number, label, colour in ((-0.2, 0, "predicted", "hbm"), (0.2, 1, "measured", "other")):
        axes.bar(
            at + offset, [pair[number] / unit for pair in there.values()], 0.38, color=COLOURS[colour], label=label
        )
    axes.set_xticks(at, [name.replace("_", "\n") for name in there])
    axes.set(ylabel=unit_name, xlim=(-0.6, len(there) - 0.4), ylim=(0, 1.3 * highest / unit))
    axes.legend(loc="upper right", frameon=False, ncols=2, fontsize="x-small")
