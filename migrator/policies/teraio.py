"""TeraIO (Yuan et al., NeurIPS'25, section 3.2, tensor migration algorithm): benefit over cost, SSDs first.

For each inactive period, with the bandwidth that earlier choices have booked, the window in which the tensor is
really away; benefit is the integral of the critical pressure it takes off (memory above capacity), cost the time
of offload and prefetch. The largest benefit over cost, what is within a tenth of it by size times
time, is taken until all fits. It goes to the SSDs, and to host
memory only where they are saturated.

Migrations that the paper calls urgent jump the queue at run time; that is no part of a plan. Weights and
optimizer states, which it moves as well, are no saved tensors. Host memory is not bounded here. Where no period
hides any more, tensors go in the order of creation and the step waits for them.
"""

from __future__ import annotations

from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.draft import Draft, Window
from torch_tiers.migrator.planner.intervals import Interval


def plan(trace: Trace, budget: int, links: Links) -> Plan:
    """Migrate by benefit over cost until everything fits."""
    draft = Draft(trace, budget, links)

    def benefit_over_cost(window: Window) -> float:
        return draft.pressure(window, window.idle.nbytes) / window.seconds

    draft.move_best_first(draft.stays, lambda idle: _place(draft, idle), benefit_over_cost)
    draft.offload_until_it_fits(draft.stays)
    return draft.plan("teraio")


def _place(draft: Draft, idle: Interval) -> Window | None:
    """The window on the SSDs, or in host memory if they are saturated; None if both would be late."""
    disk = draft.window(idle, "nvme") if draft.lanes.links.has_drive else None
    return disk if disk is not None else draft.window(idle)
