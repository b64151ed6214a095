"""Speed over memory: what the ways to run one program come to, as `tiers bench` measured them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch_tiers.planning.html.axes import COLOURS, blank, unit_of
from torch_tiers.planning.html.section import Section

_KINDS = {
    "plain": (COLOURS["waiting"], "D", "the program as it is"),
    "tiers": (COLOURS["hbm"], "o", "tiers"),
    "peer": (COLOURS["dram"], "s", "something else around it"),
    "command": (COLOURS["nvme"], "^", "another command"),
}


@dataclass(frozen=True, slots=True)
class Point:
    """One way to run the program.

    Attributes
    ----------
    name, kind : str
        What it is called, and which of the kinds of `torch_tiers.bench.variants` it is of.
    line : str
        Points of the same line are joined; empty: of none.
    nbytes : int or None
        HBM that it takes; None where nobody knows.
    speed, low, high : float
        A fraction of the plain program's: the median, the lowest and the highest.
    """

    name: str
    kind: str
    line: str
    nbytes: int | None
    speed: float
    low: float
    high: float


def speed(points: Sequence[Point]) -> Section:
    """Return the section of the figure; without memory that is known, it says so."""
    name, title = "speed", "Speed over memory"
    known = [point for point in points if point.nbytes]
    if not known:
        return Section(
            name,
            title,
            ("Nothing tells how much memory each took, as without a GPU, or how fast plain is, so nothing is drawn.",),
        )
    unit, unit_name = unit_of(max(point.nbytes or 0 for point in known))
    figure = blank(4.5)
    axes = figure.add_subplot()
    for kind, (colour, marker, label) in _KINDS.items():
        of = [point for point in known if point.kind == kind]
        for number, point in enumerate(of):
            at = (point.nbytes or 0) / unit
            spread = [[point.speed - point.low], [point.high - point.speed]]
            look: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": "none", "capsize": 3}
            axes.errorbar([at], [point.speed], yerr=spread, label=None if number else label, **look)
            axes.annotate(point.name, (at, point.speed), (5, 4), textcoords="offset points", fontsize="x-small")
        for line in dict.fromkeys(point.line for point in of if point.line):
            joined = sorted((point.nbytes or 0, point.speed) for point in of if point.line == line)
            axes.plot([at / unit for at, _ in joined], [y for _, y in joined], color=colour, linewidth=0.8, alpha=0.5)
    axes.set(xlabel=f"{unit_name} of hbm", ylabel="fraction of the plain program's speed")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.08 * max(1.0, *(point.high for point in known)))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper right", ncols=4, frameon=False)
    said = ["Up and to the left is better. Bars span the lowest and the highest round."]
    if without := [point.name for point in points if not point.nbytes]:
        said.append(f"Nothing tells how much memory these took: {', '.join(without)}.")
    return Section(name, title, tuple(said), figure)
