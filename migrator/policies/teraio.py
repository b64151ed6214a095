"""TeraIO (NeurIPS'25, section 3.2, tensor migration algorithm): benefit over cost, SSDs first.

For each inactive period, with the bandwidth that earlier choices have booked, the window in which the tensor is
really away; benefit is the integral of the critical pressure it takes off (memory above capacity), cost the time
of offload and prefetch. The largest benefit over cost is taken until all fits. It goes to the SSDs, and to host
memory only where they are saturated.

Migrations that the paper calls urgent jump the queue at run time; that is no part of a plan. Weights and
optimizer states, which it moves as well, are no saved tensors. Host memory is not bounded here. Where no period
hides any more, tensors go in the order of creation and the step waits for them.
"""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace

from migrator.draft import Draft, Window
from migrator.intervals import Interval
from migrator.links import Links
from migrator.plan import Plan
from migrator.trace import Trace


def plan(trace: Trace, budget: int, links: Links) -> Plan:
    """Migrate by benefit over cost until everything fits."""
    draft = Draft(trace, budget, links)

    def worth(idle: Interval) -> tuple[float, int]:
        window = _place(draft, idle)
        return (-draft.pressure(window, idle.nbytes) / window.seconds if window is not None else 0.0), idle.storage

    # Lazily sorted: worth only falls while others are taken, so the first that is still first is the largest.
    heap = [worth(idle) for idle in draft.stays]
    heapify(heap)
    while heap and heap[0][0] < 0 and not draft.memory.fits:
        idle = draft.idle[heap[0][1]]
        now = worth(idle)
        if now > heap[0]:
            heapreplace(heap, now)
            continue
        heappop(heap)
        window = _place(draft, idle)
        if window is not None:
            draft.move(window)
    draft.send_until_it_fits(draft.stays)
    return draft.plan("teraio")


def _place(draft: Draft, idle: Interval) -> Window | None:
    """The window on the SSDs, or in host memory if they are saturated; None if both would be late."""
    disk = draft.window(idle, "nvme") if draft.lanes.links.disk_write > 0 else None
    return disk if disk is not None else draft.window(idle)
