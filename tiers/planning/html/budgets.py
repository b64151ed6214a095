"""Speed over budget, as `tiers suggest` computes it, with the budget of the run."""

from __future__ import annotations

from collections.abc import Sequence

from torch_tiers.allocator.sizes import format_size
from torch_tiers.planning.html.axes import COLOURS, blank, unit_of
from torch_tiers.planning.html.section import Section
from torch_tiers.planning.suggest import FAST, Offer, best


def budgets(made: Sequence[Offer] | str, budget: int, times_as_long: float | None, in_dram: str = "") -> Section:
    """Return the section for what several budgets come to.

    Parameters
    ----------
    made : sequence of Offer, or str
        What they come to, or why that is not known.
    budget : int
        The budget of the run in bytes.
    times_as_long : float or None
        How many times as long an iteration took in it as with all the HBM that it needs.
    in_dram : str
        What lay in DRAM; unless that is empty, what less HBM costs is not predicted.
    """
    name, title = "budgets", "Speed over budget"
    if isinstance(made, str):
        return Section(name, title, (made,))
    fits = [offer for offer in made if offer.speed]
    if not fits:
        return Section(name, title, ("The program fits none of the budgets that were tried.",))
    unit, unit_name = unit_of(max(offer.budget for offer in made))
    figure = blank(3.0)
    axes = figure.add_subplot()
    axes.plot(
        [offer.budget / unit for offer in fits],
        [offer.speed for offer in fits],
        color=COLOURS["hbm"],
        marker="o",
        label="predicted",
    )
    suggested = best(made)
    if suggested is not None:
        axes.plot(
            [suggested.budget / unit],
            [suggested.speed],
            color=COLOURS["plan"],
            marker="o",
            markersize=11,
            fillstyle="none",
            linestyle="none",
            label="suggested",
        )
    said = []
    if budget <= 2 * max(offer.budget for offer in made):
        axes.axvline(budget / unit, color=COLOURS["budget"], linestyle="--", label="budget of the run")
        if times_as_long:
            axes.plot(
                [budget / unit],
                [1 / times_as_long],
                color=COLOURS["budget"],
                marker="D",
                linestyle="none",
                label="this run",
            )
    else:
        said.append(f"The budget of the run, {format_size(budget)}, lies far to the right.")
    axes.set(xlabel=f"TIERS_HBM in {unit_name}", ylabel="fraction of the ideal speed", ylim=(0, 1.08))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper right", ncols=4, frameon=False)
    if in_dram:
        lay = in_dram[0].upper() + in_dram[1:]
        said.append(
            f"{lay} lay below hbm: what less hbm costs such a program is not predicted, and tiers bench measures it."
        )
    elif suggested is not None:
        said.append(
            f"Suggested: {format_size(suggested.budget)}, the smallest of these with at least {FAST:.0%} of the best "
            "speed."
        )
    if made[-1].why_not is not None:
        said.append(f"{format_size(made[-1].budget)} is too small: {made[-1].why_not}.")
    return Section(name, title, tuple(said), figure)
