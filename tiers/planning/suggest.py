"""Speed over budget: what a program is predicted to come to in less HBM than it needs, from the trace of one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table

from torch_tiers.allocator.sizes import MiB, format_at_least, format_size, round_up
from torch_tiers.migrator.controller.planned import needs
from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.planning.compare import Candidate, Refused, compare
from torch_tiers.planning.in_dram import lay_below_hbm

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""What plans may fill, as shares of what the program needs."""

FAST = 0.95
"""Of the best of these speeds: the smallest budget with as much is suggested."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a budget comes to.

    Attributes
    ----------
    budget, planned : int
        Bytes that TIERS_HBM is to be, and those of them that plans may fill.
    share : float
        `planned` as a share of what the program needs.
    outcome : Candidate or Refused
        The plan, or why there is none.
    """

    budget: int
    planned: int
    share: float
    outcome: Candidate | Refused

    @property
    def speed(self) -> float:
        """The fraction of the ideal speed; 0 where the program does not fit."""
        if isinstance(self.outcome, Refused) or not self.outcome.fits(self.planned):
            return 0.0
        return self.outcome.result.fraction

    @property
    def why_not(self) -> str | None:
        """Why the program does not fit; None if it does."""
        if isinstance(self.outcome, Refused):
            return self.outcome.text
        if not self.outcome.fits_below:
            return f"{format_size(self.outcome.plan.stored_bytes)} are to be offloaded: raise TIERS_DRAM"
        return None if self.speed else f"the plan fills {format_size(self.outcome.result.peak['hbm'])} of hbm"


def needed_of(trace: Trace, links: Links, stats: Mapping[str, Any]) -> tuple[int, str]:
    """Bytes of HBM that an iteration needs with everything kept, and what of them lay in DRAM: see `lay_below_hbm`.

    Where state did, weights that lay there count, too: of neither the trace knows anything.
    """
    demoted = stats.get("demoted", 0) if stats.get("state_in_dram") else 0
    return needs(trace, links) + demoted + stats.get("state_on_nvme", 0), lay_below_hbm(stats)


def offers(
    trace: Trace, needed: int, links: Links, policy: str, *, free: float, below: int | None = None, in_dram: str = ""
) -> list[Offer]:
    """Plan for several budgets, the largest first, up to the first in which the program does not fit.

    Parameters
    ----------
    needed : int
        Bytes of HBM that an iteration needs with everything kept.
    free : float
        The part of a budget that a run leaves free: TIERS_HBM is larger than what plans fill.
    below : int or None
        Bytes that the tiers below HBM hold, if that is known.
    in_dram : str
        What of it lay in DRAM in the run. How long a step takes with less of that there is not predicted, so only a
        budget for all of it is planned for.
    """
    made = list[Offer]()
    for share in SHARES[:1] if in_dram else SHARES:
        planned = int(share * needed)
        (outcome,) = compare(trace, planned, links, (policy,), below).values()
        made.append(Offer(round_up(int(planned / (1 - free)), MiB), planned, share, outcome))  # it is to be typed
        if not made[-1].speed:
            break
    return made


def best(made: Sequence[Offer]) -> Offer | None:
    """Return the smallest budget at which the program has `FAST` of its best speed; None if it fits in none."""
    fastest = max((offer.speed for offer in made), default=0.0)
    fast = [offer for offer in made if offer.speed and offer.speed >= FAST * fastest]
    return min(fast, key=lambda offer: offer.budget, default=None)


def to_json(needed: int, made: Sequence[Offer]) -> dict[str, Any]:
    """The curve as JSON; a speed of 0 says that the program does not fit."""
    suggested = best(made)
    return {
        "needs": needed,
        "offers": [
            {
                "budget": offer.budget,
                "planned": offer.planned,
                "share": offer.share,
                "fraction_of_ideal": offer.speed,
                "why_not": offer.why_not,
            }
            for offer in made
        ],
        "suggested": None if suggested is None else suggested.budget,
    }


def render(
    trace: Trace, needed: int, made: Sequence[Offer], allocator: str, in_dram: str = ""
) -> Iterator[RenderableType]:
    """The curve as a table, and the command to copy, with that TIERS_ALLOCATOR; `in_dram` as in `offers`."""
    yield f"with everything kept an iteration is predicted to need {format_at_least(needed)} of hbm"
    if trace.varies:
        yield "iterations differ from step to step: this is for the largest one recorded, and speeds are uncertain"
    suggested = best(made)
    table = Table("TIERS_HBM", "plan fills", "speed", "moved", "recomputed", "", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for offer in made:
        row = [format_size(offer.budget), f"{offer.share:.0%} of need"]
        if isinstance(offer.outcome, Candidate) and offer.speed:
            plan = offer.outcome.plan
            row += [f"{offer.speed:.3f}", format_size(plan.moved_bytes) if plan.moved_bytes else ""]
            row += [f"{len(plan.recompute)} tensors" if plan.recompute else "", "suggested" * (offer is suggested)]
        else:
            row += ["does not fit", "", "", ""]
        table.add_row(*row)
    yield table
    yield "speeds are predicted; 1.000 is that with all of this memory; a run leaves a part of TIERS_HBM free"
    results = (offer.outcome.result for offer in made if isinstance(offer.outcome, Candidate))
    if not all(result.is_sure_of_ideal for result in results):
        yield (
            "the GPU waits for the CPU, and recorded CPU times are too long: small budgets may cost more than shown; "
            "tiers bench measures it"
        )
    if in_dram:
        yield (
            f"in the run {in_dram} lay below hbm: what less hbm costs such a program is not predicted, tiers bench "
            "measures it; suggested is room for all of it"
        )
    if made and made[-1].why_not is not None:
        yield f"{format_size(made[-1].budget)} is too small: {made[-1].why_not}"
    if suggested is None:
        yield "none of these budgets is enough: make the batch smaller"
        return
    if not in_dram:
        yield f"suggested: the smallest of these with at least {FAST:.0%} of the best speed"
    yield f"TIERS_ALLOCATOR={allocator} TIERS_HBM={suggested.budget // MiB}MiB python YOUR_PROGRAM"
