"""Did the loss change? Compares the losses that two runs have kept, bit for bit, in the order of their backwards."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch_tiers.migrator.model.fields import BadField

Losses: TypeAlias = Sequence[tuple[int, float]]
"""The step and the value of each backward, in their order."""

_HEAD = "step,loss"
_MOST = 1 << 20  # losses of a file: more than any run writes
_LONGEST = 64  # characters of a line


def losses_from_csv(content: str) -> Losses:
    """Read the losses of a run.

    Raises
    ------
    BadField
        If the text is not what a run writes.
    """
    head, *lines = content.splitlines()[: _MOST + 2] or [""]
    if head != _HEAD or len(lines) > _MOST:
        raise BadField("losses", f"does not begin with {_HEAD}, or is longer than a run's")
    return [_row(number, line) for number, line in enumerate(lines, 2)]


def _row(number: int, line: str) -> tuple[int, float]:
    step, _, value = line.partition(",")
    try:
        if len(line) > _LONGEST or not (step.isascii() and step.isdigit()):
            raise ValueError
        return int(step), float(value)
    except ValueError:
        raise BadField(f"line {number}", "is no step and its loss") from None


@dataclass(frozen=True, slots=True)
class Difference:
    """Two losses that are not the same.

    Attributes
    ----------
    step, backward : int
        The step, and which of its backwards, from 1.
    one, other : float
        What the two runs have there.
    """

    step: int
    backward: int
    one: float
    other: float

    @property
    def by(self) -> float:
        """How far apart they are; NaN where one is none."""
        return abs(self.one - self.other)


@dataclass(frozen=True, slots=True)
class Compared:
    """What the losses of two runs have in common.

    Attributes
    ----------
    compared, steps : int
        Losses that both have, and the steps that these are of.
    one, other : int
        Losses of each run.
    differ : int
        Of those compared, the ones that are not the same bits.
    first, largest : Difference or None
        The first of these, and the one farthest apart; None if there is none.
    parted : int or None
        The step from which on the two do not call backward as often: what follows is not compared.
    """

    compared: int
    steps: int
    one: int
    other: int
    differ: int
    first: Difference | None
    largest: Difference | None
    parted: int | None


def compare(one: Losses, other: Losses) -> Compared:
    """Compare the k-th backward of one run with the k-th of the other, as long as these are of the same step."""
    differences = []
    count, step, backward, steps, parted = 0, 0, 0, 0, None
    for (of, value), (of_other, wanted) in zip(one, other, strict=False):
        if of != of_other:
            parted = min(of, of_other)
            break
        backward = backward + 1 if of == step and count else 1
        steps += backward == 1
        count, step = count + 1, of
        if _bits(value) != _bits(wanted):
            differences.append(Difference(of, backward, value, wanted))
    largest = max(differences, key=_distance, default=None)
    first = differences[0] if differences else None
    return Compared(count, steps, len(one), len(other), len(differences), first, largest, parted)


def to_json(told: Compared) -> dict[str, Any]:
    """The comparison as JSON; what is no number is a text."""
    return {
        "equal": not told.differ and told.one == told.other == told.compared,
        "compared": told.compared,
        "steps": told.steps,
        "losses": [told.one, told.other],
        "differ": told.differ,
        "first": _difference(told.first),
        "largest": _difference(told.largest),
    }


def render(told: Compared) -> Iterator[str]:
    """The comparison in sentences."""
    what = f"{told.compared} losses of {told.steps} steps"
    if not told.compared:
        yield "there is nothing to compare: the runs have no loss of the same step"
    elif told.first is None or told.largest is None:
        yield f"the loss is the same, bit for bit: {what} were compared"
    else:
        yield f"the loss differs from {_place(told, told.first)} on: {told.first.one!r}, and {told.first.other!r} there"
        largest = "" if told.largest is told.first else f"; the most, {_by(told.largest)}, at {_at(told, told.largest)}"
        yield f"there they are {_by(told.first)} apart{largest}; {told.differ} of {what} differ"
        yield "without deterministic kernels a program differs from itself, too: compare two runs of the other"
    if told.parted is not None:
        yield f"from step {told.parted} on they do not call backward equally often, and nothing is compared"
    elif told.one != told.other:
        yield f"one run has {told.one} losses, the other {told.other}: what only one has is not compared"


def _place(told: Compared, difference: Difference) -> str:
    several = told.compared > told.steps
    return f"step {difference.step}" + (f", backward {difference.backward} of it," if several else "")


def _at(told: Compared, difference: Difference) -> str:
    return _place(told, difference).rstrip(",")


def _by(difference: Difference) -> str:
    if not math.isfinite(difference.by):
        return "no number"
    part = difference.by / abs(difference.other) if difference.other else math.inf
    return f"{difference.by:.3g} ({part:.2g} of the value)" if math.isfinite(part) else f"{difference.by:.3g}"


def _distance(difference: Difference) -> float:
    return math.inf if math.isnan(difference.by) else difference.by


def _bits(value: float) -> bytes:
    return b"nan" if math.isnan(value) else struct.pack("<d", value)


def _difference(difference: Difference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    one, other, by = (
        value if math.isfinite(value) else str(value) for value in (difference.one, difference.other, difference.by)
    )
    return {"step": difference.step, "backward": difference.backward, "one": one, "other": other, "by": by}
