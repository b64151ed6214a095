"""Step time over the run, with the plans and the monitor's verdicts."""

from __future__ import annotations

import numpy as np

from torch_tiers.planning.html.axes import COLOURS, blank
from torch_tiers.planning.html.history import ANEW, PLAN, VERDICT, History, Mark
from torch_tiers.planning.html.section import Section
from torch_tiers.planning.html.thin import every, extremes

_BUCKETS = 500
_LINES = 60  # upright ones, of each kind
_TOLD = 12  # plans, and verdicts, in words
_STEEP = 8  # times the median: the first steps would leave the others no height


def steps(of: History | str) -> Section:
    """Return the section for the steps of a timeline, or for what kept that from being read."""
    name, title = "steps", "Step time over the run"
    if isinstance(of, str):
        return Section(name, title, (of,))
    if not len(of.numbers):
        return Section(name, title, ("The timeline has no steps: its first one has no beginning.",))
    from matplotlib.ticker import MaxNLocator

    figure = blank(3.0)
    axes = figure.add_subplot()
    took = of.seconds * 1e3
    picked = extremes(took, _BUCKETS)
    marker = "." if len(picked) < 200 else None
    axes.plot(of.numbers[picked], took[picked], color=COLOURS["hbm"], linewidth=0.8, marker=marker, label="step")
    usual = float(np.median(took))
    axes.axhline(usual, color=COLOURS["waiting"], linewidth=0.8, linestyle=":", label="median")
    for colour, label, kind in (
        ("plan", "a plan is adopted", PLAN),
        ("stall", "recorded anew", ANEW),
        ("dram", "the monitor's verdict", VERDICT),
    ):
        marks = _of(of, kind)
        for count, number in enumerate(every(marks, _LINES)):
            axes.axvline(
                marks[number].step, color=COLOURS[colour], linewidth=0.9, linestyle="--", label=None if count else label
            )
    steep = usual > 0 and float(took.max()) > _STEEP * usual
    if steep and float(took.min()) > 0:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.1 * max(float(took.max()), 1e-3))
    axes.set(xlabel="step", ylabel="ms")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper right", ncols=4, frameon=False)
    return Section(name, title, _said(of, thinned=len(picked) < len(took)), figure)


def _said(of: History, *, thinned: bool) -> tuple[str, ...]:
    said = []
    if thinned:
        said.append(f"Of {len(of.numbers)} steps the shortest and the longest of each stretch of the run are drawn.")
    if of.dropped:
        said.append(f"The timeline did not keep {of.dropped} early events.")
    for kind, kinds in ((PLAN, "plans"), (VERDICT, "verdicts of the monitor")):
        marks = _of(of, kind)
        said += [_told(mark) for mark in marks[:_TOLD]]
        if len(marks) > _TOLD:
            said.append(f"There were {len(marks) - _TOLD} more {kinds}.")
    return tuple(said) or ("The timeline tells of no plan.",)


def _of(history: History, kind: str) -> list[Mark]:
    return [mark for mark in history.marks if mark.name.startswith(kind)]


def _told(mark: Mark) -> str:
    return f"Step {mark.step:.0f}: {mark.name}{': ' if mark.more else ''}{mark.more}"
