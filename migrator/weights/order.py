"""The order in which a pass reads its weights, as the last pass of its kind did. Pure.

A pass is one call of a model without gradients; or forwards with gradients, and the backwards that follow them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

END = -1  # in the place of a weight: a forward or a backward ends, and with it all copies
KINDS = 16  # of passes that are remembered, at most: a program may have ever new models
MOST = 1 << 16  # reads of a pass that are remembered, at most: a pass may have no end


@dataclass(slots=True)
class _Pass:
    """What the last pass of a kind read, and how far the present one has come in that.

    Attributes
    ----------
    places : dict of int to list of int
        Of each weight in `reads`, ascending.
    next : int
        The place of the read that is expected.
    now : list of int
        What the present pass has read so far.
    """

    reads: list[int] = field(default_factory=list)
    places: dict[int, list[int]] = field(default_factory=dict)
    next: int = 0
    now: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """Expect what was read until now."""
        if self.now and self.now != self.reads:
            self.reads, self.places = self.now, {}
            for place, weight in enumerate(self.reads):
                self.places.setdefault(weight, []).append(place)
        self.now, self.next = [], 0


class Order:
    """The reads that come next, if the present pass goes as the last one of its kind did."""

    def __init__(self) -> None:
        self._passes: dict[Hashable, _Pass] = {}  # the last one that began at the end
        self._pass = _Pass()

    def begin(self, kind: Hashable) -> None:
        """A pass of this kind begins."""
        self._pass = self._passes.pop(kind) if kind in self._passes else _Pass()
        self._pass.begin()
        self._passes[kind] = self._pass
        if len(self._passes) > KINDS:
            del self._passes[next(iter(self._passes))]

    def resume(self, kind: Hashable) -> None:
        """The last pass of this kind goes on, after one of another kind in its midst, such as an evaluation."""
        self._pass = self._passes.get(kind, self._pass)

    def read(self, weight: int) -> bool:
        """A weight is read; whether the pass was expected to read it at any time."""
        now = self._pass
        places = now.places.get(weight, [])
        if weight != END and now.now and now.now[-1] == weight:
            return bool(places)
        if len(now.now) < MOST:
            now.now.append(weight)
        if places:  # else it was not expected, and what was still is
            # Where it was read nearest to the place that was come to, as some are left out, and others come once more.
            index = bisect_left(places, now.next)
            around = places[max(0, index - 1) : index + 1]
            now.next = min(around, key=lambda place: (abs(place - now.next), place < now.next)) + 1
        return bool(places)

    def end(self) -> None:
        """A forward or a backward ends: what is read after it is not expected before the next one begins."""
        self.read(END)

    def coming(self) -> Iterator[int]:
        """The weights that are expected, the next one first; one that is read several times comes as often."""
        now = self._pass
        return takewhile(END.__ne__, (now.reads[place] for place in range(now.next, len(now.reads))))

    def reads_before(self, weight: int) -> float:
        """How many reads are expected before this weight is read again; infinity if that is not expected."""
        place = self._next_place(weight)
        return place - self._pass.next if place < self._next_place(END) else float("inf")

    def _next_place(self, weight: int) -> float:
        places = self._pass.places.get(weight, [])
        index = bisect_left(places, self._pass.next)
        return places[index] if index < len(places) else float("inf")
