"""SuperNeurons (Wang et al., PPoPP'18): a tensor cache, and recomputation of cheap layers.

Cost-aware recomputation: layers other than convolution, matrix product, fork, join and concatenation are
recomputed; those are the trace's recipes but for additions and concatenations. The bottleneck is the most that
one layer needs in backward. A segment is recomputed once, with all of it kept (speed-centric), while that
takes no more than the bottleneck. Beyond it the paper recomputes for each layer anew (memory-centric); the runtime
always keeps what it has made until its last use, so here the rest of such a segment is left to the cache.

Tensor cache: tensors leave HBM only when it is full, the least recently used first, those of the layer under way
never; in backward each checkpointed layer fetches what the one before it needs. The paper moves outputs of
convolutions only; models without convolutions would have nothing to move, so here all that is not
recomputed may leave. Workspaces of convolutions are cuDNN's own affair in PyTorch.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.timing import product_in
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.draft import Draft
from torch_tiers.migrator.planner.layers import layers

RECOMPUTES = True

CHECKPOINTS = frozenset(("add", "cat", "stack"))  # operations with recipes that join or concatenate


def plan(trace: Trace, budget: int, links: Links) -> Plan:
    """Recompute what is cheap if not all fits, and have the cache move what still does not."""
    draft = Draft(trace, budget, links)
    if not draft.memory.fits:
        _recompute_segments(draft)
        _evict(draft)
    return draft.plan("superneurons")


def bottleneck(trace: Trace) -> int:
    """The most bytes that one layer needs in backward."""
    nbytes = trace.storage_bytes
    return max((sum(nbytes[k] for k in {site.storage for site in layer.sites}) for layer in layers(trace)), default=0)


def _recompute_segments(draft: Draft) -> None:
    most, nbytes = bottleneck(draft.trace), draft.trace.storage_bytes
    segment: dict[int, float] = {}  # storage -> bytes from the last checkpoint up to it; all beyond what takes too much
    for storage in draft.idle:
        if not draft.recomputable(storage):
            continue
        op, inputs = draft.trace.recipes[storage].op, draft.trace.recipes[storage].inputs
        last = op.partition("(")[0].rstrip("_")
        if last in CHECKPOINTS or product_in(op):  # matrix products are not cheap
            continue
        segment[storage] = nbytes[storage] + sum(segment.get(source, 0) for source in inputs)
        if segment[storage] <= most:
            draft.recompute(storage)
        else:
            segment[storage] = math.inf


def _evict(draft: Draft) -> None:
    """Go through the iteration; where HBM is too full, evict from the tail of the cache."""
    fetch = _fetches(draft)
    tail = deque(sorted(draft.stays, key=lambda idle: idle.begin))
    memory = draft.memory
    for stretch in np.flatnonzero(memory.over):
        while memory.used[stretch] > memory.room[stretch] and tail and tail[0].begin + 2 <= stretch:
            idle = tail.popleft()
            if stretch < fetch[idle.storage] + 1:
                draft.offload(idle, int(stretch), fetch[idle.storage] + 1)


def _fetches(draft: Draft) -> dict[int, int]:
    """Where each storage is fetched: as backward enters the next checkpointed layer, or where it is needed itself."""
    at = {idle.storage: idle.end - 1 for idle in draft.stays}
    entered: int | None = None
    for layer in reversed(layers(draft.trace)):
        needed = {site.storage for site in layer.sites} & at.keys()
        for storage in needed:
            if entered is not None and draft.idle[storage].begin < entered < at[storage]:
                at[storage] = entered
        entered = layer.entered if needed and layer.entered is not None else entered
    return at
