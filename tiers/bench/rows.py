"""What the rounds come to: a row for each variant, medians with their spread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch_tiers.bench.losses import apart
from torch_tiers.bench.program import Outcome
from torch_tiers.bench.variants import PLAIN, Variant


@dataclass(frozen=True, slots=True)
class Spread:
    """A median over rounds, and the lowest and highest."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Row:
    """A variant.

    Attributes
    ----------
    budget : str
        For people; empty without one.
    reason : str
        Why there are no numbers, or no more of them; empty if all is well.
    left_out : bool
        Whether it was not even tried, as it cannot be had with this program or on this machine.
    step : Spread or None
        Seconds of a step.
    fraction : Spread or None
        Of the plain program's speed, round by round.
    memory : int or None
        The most bytes of HBM in any round.
    over : bool
        Whether that is more than its budget: as where there is no GPU, and budgets are counted alone.
    moved : int or None
        Bytes that an iteration moved both ways, in the last round.
    settled : bool
        Whether all steps that count were under the last plan, in all rounds.
    losses : str
        How they compare with those of the plain program's first run.
    """

    variant: Variant
    budget: str
    reason: str
    left_out: bool = False
    step: Spread | None = None
    fraction: Spread | None = None
    memory: int | None = None
    over: bool = False
    moved: int | None = None
    settled: bool = True
    losses: str = ""

    def to_json(self) -> dict[str, Any]:
        """The row for programs."""
        told: dict[str, Any] = {"variant": self.variant.name, "kind": self.variant.kind, "policy": self.variant.policy}
        told |= {"hbm": self.budget, "reason": self.reason, "left_out": self.left_out}
        for name in ("step", "fraction"):
            spread: Spread | None = getattr(self, name)
            told[name] = None if spread is None else {"median": spread.median, "low": spread.low, "high": spread.high}
        return told | {name: getattr(self, name) for name in ("memory", "over", "moved", "settled", "losses")}


def rows(outcomes: Mapping[Variant, Sequence[Outcome]]) -> Iterator[Row]:
    """The rows, in the order of the variants."""
    plain = outcomes[PLAIN]
    for variant, runs in outcomes.items():
        reason = runs[-1].reason
        done = [one for one in runs if one.step is not None]
        told = variant.told_budget(plain[0].memory)
        if not done:
            yield Row(variant, told, reason, not runs[-1].tried)
            continue
        ratios = [base.step / one.step for base, one in zip(plain, done, strict=False) if base.step and one.step]
        memory = max((one.memory for one in done if one.memory is not None), default=None)
        yield Row(
            variant,
            told,
            reason,
            False,
            _spread([one.step for one in done if one.step is not None]),
            _spread(ratios) if ratios else None,
            memory,
            any(one.budget is not None and (one.memory or 0) > one.budget for one in done),
            done[-1].moved,
            all(one.settled for one in done),
            _agreement(variant, plain[0], done),
        )


def _spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def _agreement(variant: Variant, plain: Outcome, runs: Sequence[Outcome]) -> str:
    """How the losses of a variant's runs compare with those that the plain program printed first."""
    if plain.reason:
        return "plain has none"
    others = runs[1:] if variant == PLAIN else runs
    pairs = [(plain.losses, one.losses) for one in others if one.losses]
    if not plain.losses or (others and not pairs):
        return "none printed"
    if not pairs:
        return ""
    parted = [at for pair in pairs if (at := apart(*pair)) is not None]
    if not parted:
        return "equal"
    # Counted as they are printed, which need not be in every step.
    return f"differ from the {_ordinal(min(at for at, _ in parted))} on, by up to {max(by for _, by in parted):.1e}"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
