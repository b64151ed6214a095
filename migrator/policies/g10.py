"""G10 (Zhang et al., MICRO'23): smart migrations over inactive periods, to the SSD or to host memory.

The rules are those of the paper's artifact. Inactive periods are taken by benefit, their bytes times the seconds of
the time that the tensor would be away in which memory is above the target, given what the lanes have booked; ties, and
what is within a tenth, by size times time. With
``delta = 0.5``::

    safe(tier) = (way out + way back) * (1 + delta / 2)

A period longer than ``safe(ssd)`` goes to the SSD, unless the SSD is already writing then; one longer than
``safe(host)`` to host memory; others stay. When every stretch holds at most 0.99 of the budget, or no period is
left, each prefetch is pulled forward from the latest safe moment as far as memory allows (eager prefetching).

The paper moves pages under unified memory, in hardware, weights included; ours are saved tensors. Host memory
is not bounded here: a plan's groups are checked against the tiers where it is adopted. Where no period hides the
paper's plan does not fit; ours goes on with tensors in the order of creation, and the step waits for them.
"""

from __future__ import annotations

import numpy as np

from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.draft import Draft, Window
from torch_tiers.migrator.planner.intervals import Interval

TARGET = 0.99  # of the budget
DELTA = 0.5  # margin for transfers that take longer than profiled


def plan(trace: Trace, budget: int, links: Links) -> Plan:
    """Migrate by benefit until memory is below the target throughout."""
    draft = Draft(trace, int(budget * TARGET), links)

    def benefit(window: Window) -> float:
        return window.idle.nbytes * draft.crowded(window)

    periods = [idle for idle in draft.stays if idle.end - idle.begin > 1]
    draft.move_best_first(periods, lambda idle: _place(draft, idle), benefit)
    _prefetch_eagerly(draft)
    draft.offload_until_it_fits(draft.stays)
    return draft.plan("g10")


def _place(draft: Draft, idle: Interval) -> Window | None:
    """The window on the tier that the paper's rule picks; None if the tensor is to stay."""
    links = draft.lanes.links
    if links.has_drive:
        (*_, write), (read, *_) = links.ways("nvme")
        ways = 2 * links.latency + idle.nbytes / getattr(links, write) + idle.nbytes / getattr(links, read)
        window = draft.window(idle, "nvme") if idle.seconds > ways * (1 + DELTA / 2) else None
        if window is not None and not _waits_for_drive(window):
            return window
    ways = 2 * links.latency + idle.nbytes / links.d2h + idle.nbytes / links.h2d
    return draft.window(idle) if idle.seconds > ways * (1 + DELTA / 2) else None


def _waits_for_drive(window: Window) -> bool:
    """Whether the drive is already writing when it could begin with this."""
    *before, (_, begins, _) = window.out.legs
    return begins > (before[-1][2] if before else window.idle.start)


def _prefetch_eagerly(draft: Draft) -> None:
    for storage in sorted(draft.trips, key=lambda storage: draft.away(storage)[1]):
        first, end = draft.away(storage)
        spare = draft.memory.room[first:end] - draft.memory.used[first:end]
        full = np.flatnonzero(spare < draft.idle[storage].nbytes)
        draft.come_earlier(storage, first + (int(full[-1]) + 1 if len(full) else 1))
