"""Which periods are recorded, and what was recorded: a trace for each kind of period.

The first periods, for the first plans; a few when a considerable part of one departed from the plans, as programs
alternate between kinds of periods. A program that is new in every period (routing, shapes) must not be recorded in
every period: periods that share most of their bytes are of one kind, and the pauses between two looks grow longer.
A kind that comes too rarely for a look to meet it is waited for. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_tiers.migrator.model.timing import together
from torch_tiers.migrator.model.trace import Trace

CONSIDERABLE = 1 / 8  # of a period's sites, or of its saved bytes: one with more that another lacks is of another kind
PERIODS_AFTER_DRIFT = 4  # recorded when one was of another kind: programs alternate between kinds of periods
FIRST_PAUSE, LONGEST_PAUSE = 32, 512  # periods from one look to the next
LONGER = 4  # times as long is each pause as the one before
OUTGROWN = 2  # looks in a row that saw a kind, and nothing as large as what is kept of it
KINDS = 8  # kinds of periods that are remembered


@dataclass(slots=True)
class _Kind:
    """A kind of period: the largest of it, and how many looks in a row saw none nearly as large."""

    trace: Trace
    outgrown: int = 0


class Recordings:
    """The recordings of one device.

    Parameters
    ----------
    first : int
        Periods that are recorded before there is a plan; see `migrator.model.timing`.

    Attributes
    ----------
    learning : bool
        Whether these are not all there: the first plans are for what they tell together.
    """

    def __init__(self, first: int) -> None:
        self._first = first
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what was recorded."""
        self.learning = True
        self._kinds: list[_Kind] = []
        self._to_record = self._first
        self._steady = 0  # periods as foreseen since the last drift
        self._pause, self._next_pause = 0, FIRST_PAUSE  # from one look at a drift to the next, longer each time
        self._look_again = 0  # the period from which on
        self._drifted_at = self._distance = 0  # when a period last drifted, and how long after the one before
        self._news = False  # whether the look under way, or the last one, saw anything new
        self._waits = False  # for what drifted to come again, as that look did not see it
        self._seen: list[Trace] = []  # in the look under way, of kinds that were known
        self._sizes = {True: 0, False: 0}  # periods of a kind that was known, by whether they were as large as it

    @property
    def due(self) -> bool:
        """Whether the next period is to be recorded."""
        return self._to_record > 0

    @property
    def last(self) -> bool:
        """Whether the next period is the last of those that are recorded in a row."""
        return self._to_record == 1

    @property
    def traces(self) -> tuple[Trace, ...]:
        """One for each kind of period, the one recorded last at the end."""
        return tuple(kind.trace for kind in self._kinds)

    @property
    def varies(self) -> bool:
        """Whether the periods of a kind differ in size more often than not."""
        return self._sizes[False] > self._sizes[True]

    def resume(self, traces: Sequence[Trace]) -> None:
        """Begin with what an earlier run recorded; one period tells whether it is so, and what is made again."""
        self._kinds = list(map(_Kind, traces))
        self._to_record = 1
        self.learning = False

    def add(self, trace: Trace, period: int) -> bool:
        """Take in what was recorded in period number `period`; whether it is anything new."""
        self._to_record -= 1
        kind = next((kind for kind in reversed(self._kinds) if are_of_one_kind(kind.trace, trace)), None)
        before = None if kind is None else kind.trace
        smaller = before is not None and trace.saved_bytes < before.saved_bytes
        if before is not None:
            self._sizes[trace.saved_bytes == before.saved_bytes] += 1
            self._seen.append(trace)
        new = before is None or self.learning or not (smaller or _is_alike(before, trace))
        if new:
            self.learning &= self._to_record > 0
            self._keep(trace, kind)
        # Of a smaller one it was seen what can be made again in it; the plan is for the largest of its kind.
        self._news |= new or smaller
        if self._to_record:
            return new
        if not self._news:
            # What departed from the plan is nothing that these periods tell of. To record costs time, and the memory of
            # what is otherwise recomputed: this is looked at again, but rarely.
            self._look_again = period + LONGEST_PAUSE
        return self._shrink() or new

    def _keep(self, trace: Trace, kind: _Kind | None) -> None:
        self._kinds = [other for other in self._kinds if other is not kind]
        if kind is not None and kind.trace.saved_bytes == trace.saved_bytes:
            trace = together(kind.trace, trace)
        elif kind is not None:  # of two periods of one kind that differ in size, the plan must fit the larger
            trace = max(kind.trace, trace, key=_saved_bytes)
        self._kinds.append(_Kind(trace))
        del self._kinds[:-KINDS]

    def _shrink(self) -> bool:
        """A look is over: of a kind that has been smaller for long keep the largest that was seen; whether any is."""
        seen, self._seen = self._seen, []
        shrunk = False
        for kind in self._kinds:
            largest = max((one for one in seen if are_of_one_kind(kind.trace, one)), key=_saved_bytes, default=None)
            if largest is None:
                continue
            outgrown = largest.saved_bytes < (1 - CONSIDERABLE) * kind.trace.saved_bytes
            kind.outgrown = kind.outgrown + 1 if outgrown else 0
            if kind.outgrown == OUTGROWN:
                kind.trace, kind.outgrown, shrunk = largest, 0, True
        return shrunk

    def planned(self, period: int) -> None:
        """There are plans for what was recorded: the pause until the next look begins."""
        self._look_again = max(self._look_again, period + self._pause)

    def pass_by(self, period: int, *, drifted: bool) -> None:
        """Take note of a period that was not recorded, and whether it `drifted` from the plans."""
        if not drifted:
            self._steady += 1
            if self._steady > self._next_pause:
                self._next_pause = FIRST_PAUSE
        else:
            self._distance, self._drifted_at, self._steady = period - self._drifted_at, period, 0
            if period >= self._look_again:
                self._look(period)
        # A kind that comes more rarely than a look is long: that began after it, and was over before it came again.
        comes_next = self._distance > PERIODS_AFTER_DRIFT and period + 1 == self._drifted_at + self._distance
        if comes_next and self._waits and not (self._to_record or self._news):
            self._to_record, self._waits = 1, False

    def _look(self, period: int) -> None:
        self._to_record = PERIODS_AFTER_DRIFT
        self._pause, self._next_pause = self._next_pause, min(LONGER * self._next_pause, LONGEST_PAUSE)
        self._look_again = period + self._pause
        self._news, self._waits = False, True


def are_of_one_kind(one: Trace, other: Trace) -> bool:
    """Whether neither has a considerable part that the other has not."""
    return max(one.part_besides(other), other.part_besides(one)) <= CONSIDERABLE


def _is_alike(one: Trace, other: Trace) -> bool:
    """Whether the other tells nothing new but times."""
    return one.sites == other.sites and one.recipes.keys() >= other.recipes.keys()


def _saved_bytes(trace: Trace) -> int:
    return trace.saved_bytes
