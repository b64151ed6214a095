"""Decides which iterations are recorded, and keeps one trace for each kind of iteration.

The first iterations are recorded for the first plans; a few more when the plans mispredicted a considerable part of
one, as programs alternate between kinds of iterations. A program that is new in every iteration (routing, shapes) must
not be recorded in every one: iterations that share most of their bytes are of one kind, and the pauses between
recordings grow. A kind that comes too rarely to be met by them is waited for. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import is_not

from torch_tiers.migrator.controller.kinds import CONSIDERABLE, are_of_one_kind
from torch_tiers.migrator.model.timing import together
from torch_tiers.migrator.model.trace import Trace

ITERATIONS_AFTER_MISPREDICTION = 4
"""Recorded in one look, when one was of another kind: programs alternate between kinds of iterations."""

FIRST_PAUSE, LONGEST_PAUSE = 32, 2048  # iterations from one look to the next; a look may take as long as 20
FRUITLESS_PAUSE = 512  # after one that saw nothing new
LONGER = 4  # each pause is so many times the one before
OUTGROWN = 2  # looks in a row in which a kind stayed much smaller than its trace, before that is replaced
KINDS = 8  # kinds of iterations that are remembered


@dataclass(slots=True)
class _Kind:
    """A kind of iteration: the largest of it, and how many looks in a row saw none nearly as large."""

    trace: Trace
    outgrown: int = 0


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
        self._first = first
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the traces."""
        self.learning = True
        self._kinds: list[_Kind] = []
        self._to_record = self._first
        self._steady = 0  # iterations as expected since the last misprediction
        self._pause, self._next_pause = 0, FIRST_PAUSE  # from one look to the next, longer each time
        self._look_again = 0  # the iteration from which on
        self._mispredicted_at = self._distance = 0  # which iteration was last, and how long after the one before
        self._news = False  # whether the look under way, or the last one, saw anything new
        self._waits = False  # for what was mispredicted to come again, as that look did not see it
        self._seen: list[Trace] = []  # in the look under way, of kinds that were known
        self._sizes = {True: 0, False: 0}  # iterations of a known kind, by whether they were as large as its trace

    @property
    def due(self) -> bool:
        """Return whether the next iteration is recorded."""
        return self._to_record > 0

    @property
    def traces(self) -> tuple[Trace, ...]:
        """Return one trace for each kind of iteration, the one recorded last at the end."""
        return tuple(kind.trace for kind in self._kinds)

    @property
    def varies(self) -> bool:
        """Return whether the iterations of a kind differ in size more often than not."""
        return self._sizes[False] > self._sizes[True]

    def resume(self, traces: Sequence[Trace]) -> None:
        """Begin with the traces of an earlier run; one iteration is recorded to verify them."""
        self._kinds = list(map(_Kind, traces))
        self._to_record = 1
        self.learning = False

    def add(self, trace: Trace, iteration: int) -> bool:
        """Take in the trace of iteration number `iteration`; return whether there is anything new to plan for."""
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
            # What the plan mispredicted is nothing that a trace tells of. To record costs time, and the memory of what
            # is otherwise recomputed: this is looked at again, but rarely.
            self._look_again = iteration + FRUITLESS_PAUSE
        return self._shrink() or new

    def _keep(self, trace: Trace, kind: _Kind | None) -> None:
        self._kinds = [other for other in self._kinds if other is not kind]
        if kind is not None and kind.trace.saved_bytes == trace.saved_bytes:
            trace = together(kind.trace, trace)
        elif kind is not None:  # of two iterations of one kind that differ in size, the plan must fit the larger
            trace = max(kind.trace, trace, key=_saved_bytes)
        self._kinds.append(_Kind(trace))
        del self._kinds[:-KINDS]

    def _shrink(self) -> bool:
        """End a look: of a kind that has been smaller for long keep the largest it saw. Return whether any was."""
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

    def do_without(self, keys: Collection[str]) -> bool:
        """Have nothing recomputed that was saved at these sites; return whether anything was."""
        before = self.traces
        for kind in self._kinds:
            kind.trace = kind.trace.without(keys)
        return any(map(is_not, self.traces, before))

    def demoted(self, nbytes: int, pairs: Collection[tuple[Trace, Trace]]) -> None:
        """Take in that so much state was demoted: of each pair the second trace is the first without it."""
        for kind in self._kinds if nbytes else ():
            known = (without for trace, without in pairs if kind.trace is trace)
            kind.trace = next(known, None) or kind.trace.without_state(nbytes)

    def planned(self, iteration: int) -> None:
        """Begin the pause until the next look: there are plans for what was recorded."""
        self._look_again = max(self._look_again, iteration + self._pause)

    def pass_by(self, iteration: int, *, mispredicted: bool) -> None:
        """Take in an iteration that was not recorded, and whether the plans `mispredicted` it."""
        if not mispredicted:
            self._steady += 1
            if self._steady > self._next_pause:
                self._next_pause = FIRST_PAUSE
        else:
            self._distance, self._mispredicted_at = iteration - self._mispredicted_at, iteration
            self._steady = 0
            if iteration >= self._look_again:
                self._look(iteration)
        # A kind that comes more rarely than a look is long: that began after it, and was over before it came again.
        is_rare = self._distance > ITERATIONS_AFTER_MISPREDICTION
        comes_next = is_rare and iteration + 1 == self._mispredicted_at + self._distance
        if comes_next and self._waits and not (self._to_record or self._news):
            self._to_record, self._waits = 1, False

    def _look(self, iteration: int) -> None:
        self._to_record = ITERATIONS_AFTER_MISPREDICTION
        self._pause, self._next_pause = self._next_pause, min(LONGER * self._next_pause, LONGEST_PAUSE)
        self._look_again = iteration + self._pause
        self._news, self._waits = False, True


def _is_alike(one: Trace, other: Trace) -> bool:
    """Return whether the other trace has nothing new but times."""
    return one.sites == other.sites and one.recipes.keys() >= other.recipes.keys()


def _saved_bytes(trace: Trace) -> int:
    return trace.saved_bytes
