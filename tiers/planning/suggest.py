"""Speed over budget: what a program is predicted to come to in less HBM than it needs, from the trace of one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table

from torch_tiers.allocator.sizes import MiB, format_size
from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.policies import POLICIES
from torch_tiers.migrator.simulator import simulate
from torch_tiers.planning.compare import Candidate, Refused, compare

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Budgets that are tried, of what the program needs."""

FAST = 0.95
"""Of the best of these speeds: the smallest budget at which the program has so much is suggested."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a budget comes to.

    Attributes
    ----------
    budget : int
        What TIERS_HBM is to be, in bytes.
    share : float
        Of what the program needs.
    outcome : Candidate or Refused
        The plan for what a run leaves for its plans, or why there is none.
    """

    budget: int
    share: float
    outcome: Candidate | Refused

    @property
    def speed(self) -> float:
        """The fraction of the ideal speed; 0 where the program does not fit."""
        if isinstance(self.outcome, Refused) or not self.outcome.fits(self.budget):
            return 0.0
        return self.outcome.result.fraction


def needs(trace: Trace, links: Links) -> int:
    """Return the bytes of HBM that the program needs if everything stays there."""
    return simulate(trace, links, POLICIES["keep"](trace, trace.saved_bytes, links)).peak["hbm"]


def offers(trace: Trace, links: Links, policy: str, *, free: float, below: int | None = None) -> list[Offer]:
    """Plan for several budgets, the largest first.

    Parameters
    ----------
    free : float
        The part of a budget that a run leaves free: TIERS_HBM is larger than what plans fill.
    below : int or None
        Bytes that the tiers below HBM hold, if that is known.
    """
    needed = needs(trace, links)
    made = []
    for share in SHARES:
        planned = int(share * needed)
        (outcome,) = compare(trace, planned, links, (policy,), below).values()
        budget = -(-int(planned / (1 - free)) // MiB) * MiB  # rounded up: it is to be typed
        made.append(Offer(budget, share, outcome))
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
                "share": offer.share,
                "fraction_of_ideal": offer.speed,
                "why_not": offer.outcome.text if isinstance(offer.outcome, Refused) else None,
            }
            for offer in made
        ],
        "suggested": None if suggested is None else suggested.budget,
    }


def render(trace: Trace, needed: int, made: Sequence[Offer]) -> Iterator[RenderableType]:
    """The curve as a table, and the command to copy."""
    yield f"the program needs {format_size(needed)} of hbm to keep everything there"
    if trace.varies:
        yield "sizes change from step to step: this is for the largest iteration recorded, and speeds are uncertain"
    suggested = best(made)
    table = Table("TIERS_HBM", "of its need", "speed", "moved", "recomputed", "", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for offer in made:
        row = [format_size(offer.budget), f"{offer.share:.0%}"]
        if isinstance(offer.outcome, Candidate) and offer.speed:
            plan = offer.outcome.plan
            row += [f"{offer.speed:.3f}", format_size(plan.moved_bytes) if plan.moved_bytes else ""]
            row += [f"{len(plan.recompute)} tensors" if plan.recompute else "", "suggested" * (offer is suggested)]
        else:
            row += ["does not fit", "", "", ""]
        table.add_row(*row)
        if not offer.speed:
            break  # nor does it fit in less
    yield table
    yield "speeds are predicted, as fractions of the speed with all of that memory"
    refused = next((offer.outcome for offer in made if isinstance(offer.outcome, Refused)), None)
    if refused is not None:
        yield refused.text
    if suggested is None:
        yield "none of these budgets is enough: make the batch smaller, or raise TIERS_DRAM"
        return
    yield f"suggested: the smallest that costs at most {1 - FAST:.0%} of the best speed here"
    yield f"TIERS_ALLOCATOR=pages TIERS_HBM={suggested.budget // MiB}MiB python YOUR_PROGRAM"
