"""SSDTrain (Wu et al., 2024): offload activations of the layers that the step has time for.

Adaptive keep, as the paper's code has it: the first layer ``n``, in the order of the forward, and all after it stay
in HBM for which ::

    (V_prev + 2 * v_n) / (3 * T_fwd - 2 * sum(t_prev)) > bandwidth

with the bytes saved before it and by it, the time of the whole forward and of the layers before it (backward
takes twice the forward): beyond that point offloading would still be under way when backward asks for it. Weights are
never moved, nor are small tensors (here those below 1 MiB, in the paper's code those of fewer than 8 Mi elements), nor
what the last layer saves. In backward, entering a layer prefetches
for the next one. What is still leaving when it is asked for is handed back from HBM (forwarding: the engine's part).

The paper does not look at a budget. If what is kept exceeds it, tensors go on in the order of creation.
"""

from __future__ import annotations

from itertools import pairwise

from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.draft import Draft
from torch_tiers.migrator.planner.layers import Layer, layers

SMALL = MiB  # tensors below this many bytes stay


def plan(trace: Trace, budget: int, links: Links) -> Plan:
    """Offload the layers before the first that is kept."""
    draft = Draft(trace, budget, links)
    tier = "nvme" if links.has_drive else "dram"
    bandwidth = min(getattr(links, lane) for lane in links.ways(tier)[0])
    rows = [(layer, _new(draft, layer)) for layer in layers(draft.trace)]
    # A storage that several layers save is prefetched for the one that backward enters first.
    prefetch: dict[int, int] = {}
    for (layer, _), (after, _) in pairwise(rows):
        if after.entered is not None:
            prefetch.update((site.storage, after.entered) for site in layer.sites)
    for _, new in rows[: _first_kept(draft, rows, bandwidth)]:
        for storage in new:
            idle = draft.idle[storage]
            bring_at = min(prefetch.get(storage, idle.end), idle.end - 1)
            draft.offload(idle, idle.begin + 2, bring_at + 1, tier)
    draft.offload_until_it_fits(draft.stays, tier)
    return draft.plan("ssdtrain")


def _new(draft: Draft, layer: Layer) -> list[int]:
    """The storages that this layer is the first to save, and that are worth moving."""
    born = {draft.idle[site.storage].storage for site in layer.sites if site.storage in draft.idle}
    return sorted(k for k in born if draft.first_save(k) >= layer.birth and draft.idle[k].nbytes >= SMALL)


def _first_kept(draft: Draft, rows: list[tuple[Layer, list[int]]], bandwidth: float) -> int:
    """Number of the first layer that is kept."""
    forward = sum(layer.seconds for layer, _ in rows)
    before, elapsed = 0, 0.0
    for number, (layer, new) in enumerate(rows[:-1]):
        own = sum(draft.idle[storage].nbytes for storage in new)
        if before + 2 * own > bandwidth * (3 * forward - 2 * elapsed):
            return number
        before += own
        elapsed += layer.seconds
    return max(0, len(rows) - 1)
