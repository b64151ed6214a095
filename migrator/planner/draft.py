"""A draft of a plan: the decisions so far, and the HBM and bandwidth that they leave.

Policies try a decision here, look at it and take it. Only a storage's first idle interval, from its last
save to its first use, counts: saved tensors that backward has fetched stay until their last use.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

import numpy as np

from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.booking import Lanes, Memory, Transfer
from torch_tiers.migrator.planner.decisions import Trip, assemble
from torch_tiers.migrator.planner.effects import scratch
from torch_tiers.migrator.planner.intervals import Floats, Interval, durations, inactive
from torch_tiers.migrator.planner.sizes import least_room, look_ahead

CLOSE = 0.1  # worths that differ by less count as equal


def timed(trace: Trace, links: Links) -> Trace:
    """The trace itself; if nothing was measured, one in which all positions take equally long.

    The iteration then lasts as long as it takes to move everything out and back.
    """
    if trace.times or not trace.positions:
        return trace
    seconds = trace.saved_bytes * (1 / links.d2h + 1 / links.h2d)
    step = seconds / trace.positions
    return replace(trace, times=tuple(step * (k + 1) for k in range(trace.positions)), seconds=seconds)


@dataclass(frozen=True, slots=True)
class Window:
    """What moving a storage over one idle interval would mean.

    Attributes
    ----------
    idle : Interval
        The interval.
    tier : str
        Where it goes.
    out, back : Transfer
        The ways, as the lanes are free for them.
    first, end : int
        The storage is away in stretches ``[first, end)``.
    """

    idle: Interval
    tier: str
    out: Transfer
    back: Transfer
    first: int
    end: int

    @property
    def seconds(self) -> float:
        """What the lanes are busy with it."""
        return sum(stop - start for _, start, stop in (*self.out.legs, *self.back.legs))


class Draft:
    """Decisions about one trace.

    Parameters
    ----------
    trace : Trace
        The iteration; `timed` if it was not.
    budget : int
        HBM for saved tensors and `others`, in bytes.
    links : Links
        What the lanes give.

    Attributes
    ----------
    idle : dict of int to Interval
        The interval in which a storage may be away, by storage, in the order of births.
    trips : dict of int to Trip
        What moves.
    """

    def __init__(self, trace: Trace, budget: int, links: Links) -> None:
        self.trace = timed(trace, links)
        self.memory = Memory(self.trace, budget)
        if not self.memory.fits:
            # What moves does so in groups: one comes before all of the last one was used.
            self.memory = Memory(self.trace, budget - look_ahead(1, least_room(trace, budget)))
        self.lanes = Lanes(links)
        self.idle: dict[int, Interval] = {}
        for interval in inactive(self.trace):
            self.idle.setdefault(interval.storage, interval)
        self.trips: dict[int, Trip] = {}
        self.durations: Floats = durations(self.trace)
        self._budget = budget
        self._lives = {life.ident: life for life in self.trace.lifetimes}
        self._ends = {life.ident: life.death + 2 for life in self.trace.lifetimes}  # first stretch without it
        self._away: dict[int, tuple[int, int]] = {}
        self._made: dict[int, int] = {}  # where each storage that is recomputed is made
        self._made_at: dict[int, dict[int, None]] = {}  # the same by position
        self._scratch: dict[int, int] = {}  # by position, see `effects.scratch`

    @property
    def remade(self) -> Collection[int]:
        """What is recomputed."""
        return self._made.keys()

    @property
    def stays(self) -> list[Interval]:
        """Idle intervals of what has not been decided about, in the order of births."""
        return [idle for ident, idle in self.idle.items() if ident not in self.trips and ident not in self.remade]

    def first_save(self, storage: int) -> int:
        """Position at which a storage was saved first."""
        return self._lives[storage].birth

    # ------------------------------------------------------------------------------------- moving

    def window(self, idle: Interval, tier: str = "dram") -> Window | None:
        """The move that hides best: out as early and back as late as the lanes allow; None if it would be late."""
        out = self.lanes.out(idle.nbytes, idle.start, tier)
        back = self.lanes.back(idle.nbytes, idle.stop, tier)
        if back.start < out.end:
            return None
        times = self.trace.times
        first, end = bisect_left(times, out.left) + 1, bisect_right(times, back.start)
        return Window(idle, tier, out, back, first, end) if first < end else None

    def pressure(self, window: Window, most: int) -> float:
        """Integral of memory above the room over the time it is away, in byte seconds, `most` bytes at a time."""
        span = slice(window.first, window.end)
        over = np.minimum(np.maximum(self.memory.excess[span], 0.0), most)  # twice as fast as `clip`
        over *= self.durations[span]  # not `np.dot`, which sets all cores to work on arrays of this length
        return float(over.sum())

    def crowded(self, window: Window) -> float:
        """Seconds of the time it is away in which memory is above the room."""
        span = slice(window.first, window.end)
        return float(self.durations[span][self.memory.excess[span] > 0].sum())

    def move_best_first(
        self,
        candidates: Iterable[Interval],
        place: Callable[[Interval], Window | None],
        worth: Callable[[Window], float],
    ) -> None:
        """Move candidates, the worthiest first, until memory fits or no move is worth anything.

        Ties go by bytes times idle time. What a move is worth may only fall as others are decided: so it is
        worked out anew for the head of the list alone, which is taken if it is still within `CLOSE` of the next.
        """

        def rated(idle: Interval) -> tuple[tuple[float, float, int, int], Window | None]:
            window = place(idle)
            # Rounded: else the order in which a sum was added up would decide between equals.
            value = float(np.float32(worth(window))) if window is not None else 0.0
            return (-value, -idle.nbytes * idle.seconds, idle.storage, len(self.trips)), window

        heap = [rated(idle)[0] for idle in candidates]
        heapify(heap)
        while heap and heap[0][0] < 0 and not self.memory.fits:
            rating, window = rated(self.idle[heappop(heap)[2]])
            if heap and rating > heap[0]:
                up_to_date = heap[0][3] == len(self.trips)
                if up_to_date or rating[0] > (1 - CLOSE) * heap[0][0]:
                    heappush(heap, rating)
                    continue
            if window is not None and rating[0] < 0:
                self.move(window)

    def move(self, window: Window) -> None:
        """Decide to move, and book what it takes."""
        self.lanes.book(window.out)
        self.lanes.book(window.back)
        self.offload(window.idle, window.first, window.end, window.tier)

    def offload(self, idle: Interval, first: int, end: int, tier: str | None = None) -> None:
        """Decide to have a storage away in stretches ``[first, end)``, whatever the lanes."""
        end = max(first, end)
        self.memory.add(first, end, -idle.nbytes)
        self._away[idle.storage] = first, end
        self.trips[idle.storage] = Trip(end - 1, tier)

    def come_earlier(self, storage: int, end: int) -> None:
        """Have a storage that moves be away until stretch `end` only."""
        first, before = self._away[storage]
        if end < before:
            self.memory.add(max(first, end), before, self.idle[storage].nbytes)
            self._away[storage] = first, max(first, end)
            self.trips[storage] = Trip(end - 1, self.trips[storage].tier)

    def come_with_room(self, storage: int) -> None:
        """Have a storage that moves, and would be late, come back as early as there is room."""
        self.trips[storage] = Trip(None, self.trips[storage].tier)

    def away(self, storage: int) -> tuple[int, int]:
        """The stretches in which a storage that moves is away."""
        return self._away[storage]

    def offload_until_it_fits(self, candidates: Iterable[Interval], tier: str | None = None) -> None:
        """Let the step wait: for what moves to be out at once, then for candidates that lie where HBM is too full."""
        if not self.memory.fits:
            for storage, (first, end) in self._away.items():
                at_once = min(first, self.idle[storage].begin + 2)
                self.memory.add(at_once, first, -self.idle[storage].nbytes)
                self._away[storage] = at_once, end
        over = self.memory.over
        for idle in candidates:
            if not over.any():
                return
            first, end = idle.begin + 2, idle.end
            if over[first:end].any():
                self.offload(idle, first, end, tier)
                self.come_with_room(idle.storage)
                over = self.memory.over

    # --------------------------------------------------------------------------------- recomputing

    def recomputable(self, storage: int) -> bool:
        """Whether there is a recipe, and all it needs is saved."""
        recipe = self.trace.recipes.get(storage)
        return recipe is not None and all(source in self.trace.storage_bytes for source in recipe.inputs)

    def recompute(self, storage: int) -> None:
        """Decide to drop a storage and recompute it at its first use; it then stays until its last.

        What it is made from must be there then, so that may have to stay longer, or to come back earlier.
        """
        life = self._lives[storage]
        at = self.idle[storage].end
        touched = self._make(storage, at)
        self.memory.add(min(self.trace.released_at[storage], at + 1), at + 1, -life.nbytes)
        needed = deque(self.trace.recipes[storage].inputs)
        while needed:  # chains are as long as a program makes them: no recursion
            source = needed.popleft()
            made_anew = self._need(source, at)
            if made_anew:
                touched |= made_anew
                needed.extendleft(reversed(self.trace.recipes[source].inputs))
        for position in touched:
            scratched = scratch(self.trace, dict.fromkeys(self._made_at[position], position)).get(position, 0)
            self.memory.add(position + 1, position + 2, scratched - self._scratch.get(position, 0))
            self._scratch[position] = scratched

    def _make(self, storage: int, at: int) -> set[int]:
        """Have a storage made at a position, and nowhere else; the positions at which other ones are made now."""
        before = self._made.get(storage, at)
        if before != at:
            del self._made_at[before][storage]
        self._made[storage] = at
        self._made_at.setdefault(at, {})[storage] = None
        return {before, at}

    def _need(self, source: int, at: int) -> set[int]:
        """Have `source` in HBM at position `at`; where it is made earlier for that, as `_make` says."""
        life = self._lives.get(source)
        if life is None:
            return set()
        idle = self.idle.get(source)
        touched: set[int] = set()
        if source in self._made:
            if at < self._made[source]:
                end = self._made[source] + 1
                self.memory.add(max(at + 1, min(self.trace.released_at[source], end)), end, life.nbytes)
                touched = self._make(source, at)
        elif idle is not None and source in self.trips:
            self.come_earlier(source, at)
        if at + 2 > self._ends[source]:
            self.memory.add(self._ends[source], at + 2, life.nbytes)
            self._ends[source] = at + 2
        if idle is not None and at < idle.end:
            self.idle[source] = replace(idle, end=at, stop=self.trace.times[at])
        return touched

    def chain(self, storage: int) -> float:
        """Seconds it takes to recompute `storage`, through what is recomputed itself; what several need, once."""
        needed, at = [storage], 0
        while at < len(needed):
            inputs = self.trace.recipes[needed[at]].inputs
            needed += [source for source in dict.fromkeys(inputs) if source in self.remade and source not in needed]
            at += 1
        return sum(self.trace.recipes[ident].seconds for ident in needed)

    def plan(self, policy: str) -> Plan:
        """The plan that the decisions amount to."""
        return assemble(policy, self.trace, self._budget, self.trips, self.remade)
