"""The answer at one look: what a program needs, what it ran in, and how much slower that made it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch_tiers.allocator.sizes import format_size
from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.planning.suggest import needs
from torch_tiers.planning.why import LATE, Why


@dataclass(frozen=True, slots=True)
class Answer:
    """What a run comes to.

    Attributes
    ----------
    needs, ran_in, budget : int
        Bytes of HBM: with everything kept there, at the peak of the run, and the budget.
    slower : float or None
        The part by which an iteration is longer than with all the HBM that it needs; None where nothing is predicted.
    error : float or None
        By how much more was predicted than measured, as a part of that; None where nothing was measured.
    """

    needs: int
    ran_in: int
    budget: int
    slower: float | None
    error: float | None


def answer(trace: Trace, links: Links, stats: dict[str, Any], why: Why) -> Answer:
    """Answer for a run whose last trace this is, and whose stats.json held `stats`."""
    result, measured = why.result, why.measured
    slower = error = None
    if result.ideal and not why.varies:
        error = result.seconds / measured - 1 if measured else None
        # Of what was recorded too long the ideal is too long as well.
        overstated = error is None or error > LATE - 1
        slower = max(0.0, (result.seconds if overstated or not measured else measured) / result.ideal - 1)
    return Answer(needs(trace, links), stats["peak"]["hbm"], stats["budget"]["hbm"], slower, error)


def to_json(answer: Answer) -> dict[str, Any]:
    """The answer as JSON."""
    return {
        "needs": answer.needs,
        "ran_in": answer.ran_in,
        "budget": answer.budget,
        "slower": answer.slower,
        "prediction_error": answer.error,
    }


def render(answer: Answer) -> Iterator[str]:
    """The answer in sentences."""
    share = f", {answer.ran_in / answer.needs:.0%} of that" if answer.needs else ""
    yield (
        f"the program needs {format_size(answer.needs)} of hbm; it ran in {format_size(answer.ran_in)}{share} "
        f"(budget {format_size(answer.budget)})"
    )
    if answer.slower is None:
        yield "how much slower that is cannot be told: sizes change from step to step, or nothing was timed"
        return
    how = "as fast as" if answer.slower < 0.005 else f"{answer.slower:.0%} slower than"
    text = f"it is {how} with all of that memory"
    if answer.error is None:
        yield f"{text}, as is predicted"
    elif answer.error > LATE - 1:
        yield f"{text}, as is predicted; iterations took {1 / (1 + answer.error):.2f} times what was predicted for them"
    else:
        yield f"{text}, whose iteration is predicted; for this one the prediction was off by {abs(answer.error):.0%}"
