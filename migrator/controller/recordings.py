"""Decides which iterations are recorded, and keeps one trace for each kind of iteration.

The first iterations are recorded for the first plans; a few more when the plans mispredicted a considerable part of
one, as programs alternate between kinds of iterations. A program that is new in every iteration (routing, shapes) must
not be recorded in every one: iterations that share most of their bytes are of one kind, and the pauses between
recordings grow. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_tiers.migrator.model.timing import together
from torch_tiers.migrator.model.trace import Trace

CONSIDERABLE = (
    1 / 8
)  # of an iteration's sites, or of its saved bytes: one with more that another lacks is of another kind
ITERATIONS_AFTER_MISPREDICTION = (
    4  # recorded when one was of another kind: programs alternate between kinds of iterations
)
FIRST_PAUSE, LONGEST_PAUSE = 32, 512  # iterations from one look to the next
LONGER = 4  # times as long is each pause as the one before
KINDS = 8  # kinds of iterations that are remembered


class Recordings:
    """The traces of one device.

    Parameters
    ----------
    first : int
        Iterations that are recorded before there is a plan; see `migrator.model.timing`.

    Attributes
    ----------
    learning : bool
        Whether these are not complete; the first plans are made for all of them together.
    """

    def __init__(self, first: int) -> None:
        self.learning = True
        self._traces: list[Trace] = []
        self._first = self._to_record = first
        self._steady = 0  # iterations as expected since the last misprediction
        self._pause = FIRST_PAUSE  # from one look at a misprediction to the next, longer each time
        self._look_again = 0  # the iteration from which on
        self._news = False  # whether what was recorded since the last misprediction was anything new
        self._sizes = {True: 0, False: 0}  # iterations of a known kind, by whether they were as large as its trace

    @property
    def due(self) -> bool:
        """Return whether the next iteration is recorded."""
        return self._to_record > 0

    @property
    def last(self) -> bool:
        """Return whether the next iteration is the last of those that are recorded in a row."""
        return self._to_record == 1

    @property
    def traces(self) -> tuple[Trace, ...]:
        """Return one trace for each kind of iteration, the one recorded last at the end."""
        return tuple(self._traces)

    @property
    def varies(self) -> bool:
        """Return whether the iterations of a kind differ in size more often than not."""
        return self._sizes[False] > self._sizes[True]

    def resume(self, traces: Sequence[Trace]) -> None:
        """Begin with the traces of an earlier run; one iteration is recorded to verify them."""
        self._traces = list(traces)
        self._to_record = 1
        self.learning = False

    def begin_anew(self) -> None:
        """Forget the traces."""
        self._traces.clear()
        self._to_record = self._first
        self.learning = True

    def add(self, trace: Trace, iteration: int) -> bool:
        """Take in the trace of iteration number `iteration`; return whether it is new."""
        self._to_record -= 1
        before = next((kept for kept in reversed(self._traces) if are_of_one_kind(kept, trace)), None)
        if before is not None:
            self._sizes[trace.saved_bytes == before.saved_bytes] += 1
        if before is not None and not self.learning and trace.saved_bytes < before.saved_bytes:
            self._news = True  # what can be made again in it was seen; the plan is for the largest of its kind
            return False
        if before is not None and not self.learning and _is_alike(before, trace):
            if not self._to_record and not self._news:
                # What the plan mispredicted is nothing that a trace tells of. To record costs time, and the memory
                # of what is otherwise recomputed: this is looked at again, but rarely.
                self._look_again = iteration + LONGEST_PAUSE
            return False
        self._news = True
        self.learning &= self._to_record > 0
        self._traces = [kept for kept in self._traces if kept is not before]
        if before is None:
            self._traces.append(trace)
        elif before.saved_bytes == trace.saved_bytes:
            self._traces.append(together(before, trace))
        else:  # of two iterations of one kind that differ in size, the plan must fit the larger
            self._traces.append(max(before, trace, key=lambda of: of.saved_bytes))
        del self._traces[:-KINDS]
        return True

    def pass_by(self, iteration: int, *, mispredicted: bool) -> None:
        """Take in an iteration that was not recorded, and whether the plans `mispredicted` it."""
        if not mispredicted:
            self._steady += 1
            if self._steady > self._pause:
                self._pause = FIRST_PAUSE
        elif iteration >= self._look_again:
            self._steady = 0
            self._news = False
            self._to_record = ITERATIONS_AFTER_MISPREDICTION
            self._look_again = iteration + self._pause
            self._pause = min(LONGER * self._pause, LONGEST_PAUSE)


def are_of_one_kind(one: Trace, other: Trace) -> bool:
    """Return whether neither trace has a considerable part that the other lacks."""
    return max(one.part_besides(other), other.part_besides(one)) <= CONSIDERABLE


def _is_alike(one: Trace, other: Trace) -> bool:
    """Return whether the other trace has nothing new but times."""
    return one.sites == other.sites and one.recipes.keys() >= other.recipes.keys()
