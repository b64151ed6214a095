"""Sentinel (Ren et al., HPCA'21): migration at the granularity of intervals of a few layers.

The step is cut into intervals of ``MIL`` layers. Tensors that live within one interval are short-lived: room for
their peak, ``RS(MIL)``, is reserved, and they never migrate. Of the others, those not needed in the next
interval move out by the middle of the one that made them, and come back when the interval before the one that
needs them begins. A length is feasible when ::

    Tensor(MIL) < S - RS(MIL)            what an interval needs has room beside the reservation
    T(MIL)      > Tensor(MIL) / BW       and comes in while the interval before it runs

The paper tries every feasible length for a step each; here as many as sixteen, spread from one layer to half of them,
are simulated, and the fastest kept. ``Tensor`` counts all that an interval needs, what stays included. Tensors of
one lifetime share pages: so do groups. The coldest leave first, those with the fewest accesses and the longest idle
time, and no more than must.

Where a tensor is late (case 3) the paper also tries leaving it in slow memory; PyTorch's kernels want their
operands in HBM, so waiting is the only choice. Tensors that live within a layer never reach the hooks; the trace
counts them in `others`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.draft import Draft
from torch_tiers.migrator.planner.layers import layers
from torch_tiers.migrator.planner.sizes import least_room
from torch_tiers.migrator.simulator import simulate

TRIALS = 16  # lengths that are tried at most


def plan(trace: Trace, budget: int, links: Links) -> Plan:
    """The migrations of the interval length that makes the fastest step."""
    draft = Draft(trace, budget, links)
    if draft.memory.fits:
        return draft.plan("sentinel")
    plans = [migrate(trace, budget, links, starts) for starts in feasible(draft, least_room(trace, budget))]
    return min(plans, key=lambda plan: simulate(draft.trace, links, plan).seconds)


def migrate(trace: Trace, budget: int, links: Links, starts: Sequence[int]) -> Plan:
    """The plan for intervals that begin at the positions `starts`."""
    draft = Draft(trace, budget, links)
    accesses = Counter(site.storage for site in trace.sites for _ in site.uses)
    for idle in sorted(draft.stays, key=lambda idle: (accesses[idle.storage], -idle.seconds, idle.begin)):
        if draft.memory.fits:
            break
        begin, end = _interval(starts, idle.begin), _interval(starts, idle.end)
        if end <= begin + 1:
            continue
        middle = (starts[begin] + starts[begin + 1]) // 2
        first, back = max(idle.begin + 2, middle + 1), starts[end - 1] + 1
        if draft.memory.over[first:back].any():
            draft.offload(idle, first, back)
    draft.offload_until_it_fits(draft.stays)
    return draft.plan("sentinel")


def _interval(starts: Sequence[int], position: int) -> int:
    return bisect_right(starts, position) - 1


def feasible(draft: Draft, space: int) -> Iterator[list[int]]:
    """Where the intervals of each feasible length begin; those of every length that has space if none has time."""
    rows = layers(draft.trace)
    steps = sorted({0, *(row.birth for row in rows), *(row.entered for row in rows if row.entered is not None)})
    longest = max(1, len(steps) // 2)
    lengths = sorted({round(longest ** (k / (TRIALS - 1))) for k in range(TRIALS)})
    cuts = [steps[::length] for length in lengths]
    roomy = [starts for starts in cuts if _demand(draft, starts)[0] < space] or cuts
    timely = [starts for starts in roomy if _demand(draft, starts)[1]]
    yield from timely or roomy


def _demand(draft: Draft, starts: Sequence[int]) -> tuple[int, bool]:
    """``Tensor + RS`` of intervals, in bytes, and whether ``Tensor`` comes in within an average interval."""
    needed = np.zeros(len(starts), dtype=np.int64)
    reserved = np.zeros(len(starts), dtype=np.int64)
    for idle in draft.idle.values():
        begin, end = _interval(starts, idle.begin), _interval(starts, idle.end)
        if begin == end:
            reserved[begin] += idle.nbytes
        else:
            needed[end] += idle.nbytes
    tensor = int(needed.max(initial=0))
    seconds = draft.trace.times[-1] / len(starts)
    return tensor + int(reserved.max(initial=0)), seconds > tensor / draft.lanes.links.h2d
