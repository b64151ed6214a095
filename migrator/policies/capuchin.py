"""Capuchin (Peng et al., ASPLOS'20, sections 4.3 to 4.5): swap what hides, and weigh the rest against recomputing.

For two accesses of a tensor that follow each other, at ``t_a`` and ``t_b``::

    SwapTime    = bytes / bandwidth, after what the lane has booked
    SwapOutEnd  = t_a + SwapTime
    SwapInStart = t_b - SwapTime
    FT          = SwapInStart - SwapOutEnd          (free time: not negative if the swap hides)
    MSPS        = bytes / recomputation time        (memory saving per second)

Candidates are the tensors alive in the window of peak memory. In the order of descending FT they are swapped while
that costs nothing; what is still missing is chosen one by one, the head of the swap list against the head of the
MSPS list, whichever costs the step less. What is chosen for recomputation changes the MSPS of what is made from
it. The in-trigger is the last access before SwapInStart, not within the peak window.

The paper learns the accesses in an iteration that swaps on demand; ours come with the trace. Its feedback, an
in-trigger 5% of SwapTime earlier where a tensor came late, is not here: for every policy alike, a lane that was late
is planned with as a slower one (`migrator.controller.feedback`). Nor are targets chosen before priced anew when
something that they are made from is chosen, too: what is made for one stays for the others. Tensors are accessed for
backward once, as a rule; later accesses find them in HBM.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.draft import Draft
from torch_tiers.migrator.planner.intervals import Interval

RECOMPUTES = True


def plan(trace: Trace, budget: int, links: Links) -> Plan:
    """Swap and recompute until the peak is within the budget; then the next peak, if there is one."""
    draft = Draft(trace, budget, links)
    while not draft.memory.fits:
        before = len(draft.trips) + len(draft.remade)
        _relieve(draft, _Peak.of(draft))
        if len(draft.trips) + len(draft.remade) == before:
            break
    return draft.plan("capuchin")


@dataclass(frozen=True, slots=True)
class _Peak:
    """The stretch in which most is over the room, when it begins, and when memory is within the room again."""

    top: int
    start: float
    stop: float

    @classmethod
    def of(cls, draft: Draft) -> _Peak:
        over, times = draft.memory.over, (0.0, *draft.trace.times, draft.trace.seconds)
        top = int(over.argmax())
        end = top + int((over[top:] == 0).argmax()) if (over[top:] == 0).any() else len(over)
        return cls(top, times[top], times[end])

    def is_left(self, draft: Draft) -> bool:
        return bool(draft.memory.used[self.top] > draft.memory.room[self.top])


def _relieve(draft: Draft, peak: _Peak) -> None:
    alive = [idle for idle in draft.stays if idle.begin + 2 <= peak.top < idle.end]
    late = deque[int]()
    for idle in sorted(alive, key=lambda idle: -_free_time(draft, idle)):
        if not peak.is_left(draft):
            return
        if _overhead(draft, idle, peak) > 0:
            late.append(idle.storage)
        else:
            _swap(draft, idle)

    def saving(storage: int) -> tuple[float, int]:
        return -draft.idle[storage].nbytes / max(draft.chain(storage), 1e-9), storage

    # Lazily sorted: MSPS only falls while sources are chosen, so the first that is still first is the largest.
    recomputes = [saving(storage) for storage in late if draft.recomputable(storage)]
    heapify(recomputes)
    while late and peak.is_left(draft):
        while recomputes and (recomputes[0][1] in draft.trips or saving(recomputes[0][1]) > recomputes[0]):
            _, storage = heappop(recomputes)
            if storage not in draft.trips:
                heappush(recomputes, saving(storage))
        idle = draft.idle[late[0]]
        if idle.storage in draft.remade:
            late.popleft()
        elif recomputes and draft.chain(recomputes[0][1]) <= _overhead(draft, idle, peak):
            draft.recompute(heappop(recomputes)[1])
        else:
            late.popleft()
            _swap(draft, idle)


def _free_time(draft: Draft, idle: Interval) -> float:
    """FT, with what the lanes have booked so far; minus infinity if it would have to begin before the iteration."""
    out, back = draft.lanes.out(idle.nbytes, idle.start), draft.lanes.back(idle.nbytes, idle.stop)
    return back.start - out.end if back.start >= 0 else -math.inf


def _overhead(draft: Draft, idle: Interval, peak: _Peak) -> float:
    """Seconds that the step would wait: to be out by the peak, and to be back although it starts after the peak."""
    out, back = draft.lanes.out(idle.nbytes, idle.start), draft.lanes.back(idle.nbytes, idle.stop)
    return max(0.0, out.left - peak.start) + max(0.0, max(out.end, peak.stop) - back.start)


def _swap(draft: Draft, idle: Interval) -> None:
    """Swap, and book the lanes; a swap with overhead comes back when there is room, as its in-trigger is past."""
    window = draft.window(idle)
    if window is not None:
        draft.lanes.book(window.out)
        draft.lanes.book(window.back)
        draft.offload(idle, idle.begin + 2, window.end)
        return
    draft.lanes.book(draft.lanes.out(idle.nbytes, idle.start))
    draft.offload(idle, idle.begin + 2, idle.end)
    draft.come_with_room(idle.storage)
