"""The order in which a pass reads its weights, as the last pass of its kind did. Pure.

A pass is one call of a model without gradients, or a training step: forwards and backwards up to the optimizer's step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator

KINDS = 16  # of passes, at most: of a program that has ever new models the last ones
MOST = 1 << 16  # reads that are remembered of a pass: of a program in which none ends


class Order:
    """What reads come next, while the pass goes as the one before of its kind did; and as far as it does."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[list[int], dict[int, list[int]]]] = {}
        self._reads: list[int] = []
        self._places: dict[int, list[int]] = {}  # of each weight in `_reads`, ascending
        self._next = 0  # the place of the read that is expected
        self._kind: Hashable = None
        self._now: list[int] = []

    def begin(self, kind: Hashable) -> None:
        """A pass begins, of this kind; what the one before read is what the next one of that kind is expected to."""
        if self._now and self._now != self._reads:
            places: dict[int, list[int]] = {}
            for place, weight in enumerate(self._now):
                places.setdefault(weight, []).append(place)
            self._known.pop(self._kind, None)
            self._known[self._kind] = self._now, places
            if len(self._known) > KINDS:
                del self._known[next(iter(self._known))]
        self._kind, self._now, self._next = kind, [], 0
        self._reads, self._places = self._known.get(kind, ([], {}))

    def read(self, weight: int) -> None:
        """A weight is read."""
        if self._now and self._now[-1] == weight:
            return
        if len(self._now) < MOST:
            self._now.append(weight)
        places = self._places.get(weight, [])
        index = bisect_left(places, self._next)
        if index < len(places):  # else it is read once more than the last time: the others come as they were to
            self._next = places[index] + 1

    def coming(self) -> Iterator[int]:
        """The weights that are expected, the next one first; one that is read several times comes as often."""
        return (self._reads[place] for place in range(self._next, len(self._reads)))

    def until(self, weight: int) -> float:
        """How many reads are expected before a weight is read again; infinity if it is not."""
        places = self._places.get(weight, [])
        index = bisect_left(places, self._next)
        return places[index] - self._next if index < len(places) else float("inf")
