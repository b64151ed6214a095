"""Page groups as bars over the iteration, coloured by the tier that they lie in."""

from __future__ import annotations

from dataclasses import dataclass

from torch_tiers.migrator.planner.schedule import spans_of
from torch_tiers.migrator.simulator.group import past_dram
from torch_tiers.planning.html.axes import COLOURS, bars, blank, key
from torch_tiers.planning.html.planned import NO_PLAN, Planned
from torch_tiers.planning.html.section import Section
from torch_tiers.planning.html.thin import every

_ROWS = 150
_ON_THE_WAY = COLOURS["moving"]


@dataclass(frozen=True, slots=True)
class Bar:
    """Where a group lies from when to when, in ms; `place` is a tier, or ``on the way``."""

    place: str
    begin: float
    end: float


def bars_of(of: Planned) -> list[list[Bar]]:
    """Return the bars of every group of the plan, in the order of their first saves.

    A group lies in HBM until its copy below is done. Its memory may be used on, for as long as nobody needs it.
    """
    spans = spans_of(of.plan, of.effect)
    past = past_dram(of.plan.groups, of.links.dram) if of.links.disk_write else frozenset[int]()
    edges, made = of.edges, []
    for number, (group, span) in enumerate(zip(of.plan.groups, spans, strict=True)):
        goes, gone, returns, home = (1e3 * seconds for seconds in of.result.moves[number])
        to_drive = number in past or of.links.ways(group.tier)[0] != ("d2h",)
        born = edges[1 + min(of.trace.by_key[site].birth for site in group.sites)]
        last = edges[-1] if span.need is None else edges[min(span.leave + 2, len(edges) - 1)]
        below = "nvme" if to_drive else "dram"
        if home:
            parts = [("hbm", born, goes), ("on the way", goes, gone), (below, gone, returns)]
            parts += [("on the way", returns, home), ("hbm", home, max(home, last))]
        elif span.need is None:
            parts = [("hbm", born, goes), ("on the way", goes, gone), (below, gone, last)]
        else:  # it has left no room that somebody else took
            parts = [("hbm", born, last)]
        made.append([Bar(place, begin, end) for place, begin, end in parts if end > begin])
    return sorted(made, key=lambda bars: bars[0].begin if bars else 0.0)


def groups(of: Planned | None) -> Section:
    """Return the section for a plan."""
    name, title = "groups", "Page groups by tier"
    if of is None:
        return Section(name, title, (NO_PLAN,))
    if not of.plan.groups:
        return Section(name, title, ("The last plan moves nothing, so there are no page groups.",))
    if not of.timed:
        return Section(name, title, ("The trace has no times, so it is not known where a group lies when.",))
    made = bars_of(of)
    picked = every(made, _ROWS)
    figure = blank(1.2 + min(4.0, 0.14 * len(picked) + 0.6))
    axes = figure.add_subplot()
    longest = float(of.edges[-1])
    colours = {"hbm": COLOURS["hbm"], "on the way": _ON_THE_WAY, "dram": COLOURS["dram"], "nvme": COLOURS["nvme"]}
    for row, number in enumerate(picked):
        for place, colour in colours.items():
            spans = [(bar.begin, bar.end) for bar in made[number] if bar.place == place]
            bars(axes, row, spans, longest, color=colour)
    axes.set(xlabel=of.across, ylabel="group", xlim=(0, longest), ylim=(len(picked) - 0.4, -0.6))
    ticks = range(0, len(picked), max(1, -(-len(picked) // 8)))
    axes.set_yticks(list(ticks), [str(picked[row] + 1) for row in ticks])
    there = {bar.place for each in made for bar in each}
    key(axes, [(place, colour) for place, colour in colours.items() if place in there])
    said = ["A row is a group of the last plan, from its first save to its last use, as it was simulated."]
    if len(picked) < len(made):
        said.append(f"Of {len(made)} groups every {picked.step}th is drawn.")
    return Section(name, title, tuple(said), figure)
