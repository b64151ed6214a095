"""Capuchin (Peng et al., ASPLOS'20, section 4.3 to 4.5): swap what hides, and weigh the rest against recomputing.

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
in-trigger 5% of SwapTime earlier where a tensor came late, takes effect between steps, not in a plan. Tensors
are accessed for backward once, as a rule; later accesses find them in HBM.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from heapq import heapify, heappop, heappush

import numpy as np

from migrator.draft import Draft
from migrator.intervals import Interval
from migrator.links import Links
from migrator.plan import Plan
from migrator.trace import Trace


def plan(trace: Trace, budget: int, links: Links) -> Plan:
    """Swap and recompute until the peak is within the budget."""
    draft = Draft(trace, budget, links)
    while not draft.memory.fits:  # each round flattens the highest window that is left
        before = len(draft.trips) + len(draft.remade)
        _relieve(draft, *_peak_window(draft))
        if len(draft.trips) + len(draft.remade) == before:
            break
    return draft.plan("capuchin")


def _peak_window(draft: Draft) -> tuple[int, int]:
    """The stretches ``[first, end)`` around the highest one in which memory is over the room throughout."""
    over = draft.memory.over
    top = int(over.argmax())
    free = np.flatnonzero(over == 0)
    at = int(np.searchsorted(free, top))
    return int(free[at - 1]) + 1 if at else 0, int(free[at]) if at < len(free) else len(over)


def _relieve(draft: Draft, first: int, end: int) -> None:
    alive = [idle for idle in draft.stays if idle.begin + 2 < end and first < idle.end]
    later = []
    for idle in sorted(alive, key=lambda idle: -_free_time(draft, idle)):
        if _flat(draft, first, end):
            return
        window = draft.window(idle)
        if window is not None and window.first < end <= window.end:
            draft.move(window)
        else:
            later.append(idle)
    _weigh(draft, first, end, later)


def _weigh(draft: Draft, first: int, end: int, swaps: list[Interval]) -> None:
    """Choose one by one by overhead; `swaps` in the order of free time."""

    def saving(storage: int) -> tuple[float, int]:
        return -draft.idle[storage].nbytes / max(draft.chain(storage), 1e-9), storage

    # Lazily sorted: MSPS only falls while sources are chosen, so the first that is still first is the largest.
    remakes = [saving(idle.storage) for idle in swaps if draft.remakable(idle.storage)]
    heapify(remakes)
    queue = deque(swaps)
    while queue and not _flat(draft, first, end):
        swap = queue[0]
        while remakes and (remakes[0][1] in draft.trips or saving(remakes[0][1]) > remakes[0]):
            _, storage = heappop(remakes)
            if storage not in draft.trips:
                heappush(remakes, saving(storage))
        if swap.storage in draft.remade:
            queue.popleft()
        elif remakes and draft.chain(remakes[0][1]) <= -_free_time(draft, swap):
            draft.remake(heappop(remakes)[1])
        else:
            _swap_late(draft, queue.popleft())


def _free_time(draft: Draft, idle: Interval) -> float:
    """FT, with what the lanes have booked so far; minus infinity if it would have to begin before the period."""
    out, back = draft.lanes.out(idle.nbytes, idle.start), draft.lanes.back(idle.nbytes, idle.stop)
    return back.start - out.end if back.start >= 0 else -math.inf


def _swap_late(draft: Draft, idle: Interval) -> None:
    """Swap although the step waits for it: out as the lane allows, back in the stretch before its use."""
    out = draft.lanes.out(idle.nbytes, idle.start)
    draft.lanes.book(out)
    gone = bisect_left(draft.trace.times, out.left) + 1
    draft.send(idle, min(gone, max(idle.begin + 2, idle.end - 1)), idle.end)


def _flat(draft: Draft, first: int, end: int) -> bool:
    return not draft.memory.over[first:end].any()
