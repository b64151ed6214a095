"""vDNN (Rhu et al., MICRO'16, section III): offload the input feature maps of layers by their type.

`plan_all` offloads what every layer needs in backward but activation functions and softmax, which work in
place, and never what the last layer needs, as that is wanted at once. `plan_conv` offloads for convolutions
only. Offloading is layer-synchronous: a layer's forward waits until what earlier layers offload has left
HBM (III-B); here it waits group by group, so for up to 192 MiB less. In backward each layer prefetches for one
earlier layer, and looks for it no further than to the nearest convolution (III-B, the pseudocode).

`plan_dyn` tries none, conv and all, in this order, and takes the first that fits the budget (III-C). The
paper tries each with several convolution algorithms; in PyTorch cuDNN chooses those by itself, so only
the choice of what to offload is left. A layer here is one call of a module that saved something.
"""

from __future__ import annotations

from dataclasses import replace

from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.decisions import Trip, assemble
from torch_tiers.migrator.planner.draft import Draft
from torch_tiers.migrator.planner.layers import ACTIVATIONS, CONVOLUTIONS, Layer, layers


def plan_all(trace: Trace, budget: int, links: Links) -> Plan:
    """Offload for every layer, whatever the budget."""
    return layer_synchronous(assemble("vdnn-all", trace, budget, trips(trace, of_all(trace))), trace)


def plan_conv(trace: Trace, budget: int, links: Links) -> Plan:
    """Offload for convolutions, whatever the budget."""
    return layer_synchronous(assemble("vdnn-conv", trace, budget, trips(trace, of_convolutions(trace))), trace)


def plan_dyn(trace: Trace, budget: int, links: Links) -> Plan:
    """Offload nothing if that fits, else for convolutions if that fits, else for every layer."""
    return layer_synchronous(assemble("vdnn-dyn", trace, budget, least(trace, budget, links)), trace)


def of_all(trace: Trace) -> set[int]:
    """Storages that all layers but the last need, activation functions left out."""
    rows = [layer for layer in layers(trace) if layer.kind not in ACTIVATIONS]
    return _needed_by(rows[:-1]) - _needed_by(rows[-1:])


def of_convolutions(trace: Trace) -> set[int]:
    """Storages that convolutions need, but not the last layer."""
    rows = [layer for layer in layers(trace) if layer.kind not in ACTIVATIONS]
    return _needed_by([layer for layer in rows if layer.kind in CONVOLUTIONS]) - _needed_by(rows[-1:])


def least(trace: Trace, budget: int, links: Links) -> dict[int, Trip]:
    """The trips of the first choice, of none, conv and all, that fits the budget; of all if none fits."""
    choice: dict[int, Trip] = {}
    for offloaded in (set[int](), of_convolutions(trace), of_all(trace)):
        choice = trips(trace, offloaded)
        draft = Draft(trace, budget, links)
        for ident, trip in choice.items():
            if ident in draft.idle and trip.bring_at is not None:
                # Gone when the layer after next is under way, there when its prefetch begins.
                draft.offload(draft.idle[ident], draft.idle[ident].begin + 2, trip.bring_at + 1)
        if draft.memory.fits:
            break
    return choice


def trips(trace: Trace, offloaded: set[int]) -> dict[int, Trip]:
    """When the prefetch of each storage begins: each layer's backward prefetches for at most one layer before it.

    What no layer prefetched is fetched by the layer that needs it.
    """
    rows = layers(trace)
    waiting = offloaded & {life.ident for life in trace.lifetimes}
    found: dict[int, Trip] = {}
    nearest = len(rows)  # the last layer before the current one that still waits for its prefetch
    convolution = [number for number, layer in enumerate(rows) if layer.kind in CONVOLUTIONS]
    for current in range(len(rows) - 1, -1, -1):
        _fetch(rows[current], rows[current], waiting, found)
        while convolution and convolution[-1] >= current:
            convolution.pop()
        nearest = min(nearest, current - 1)
        while nearest >= 0 and waiting.isdisjoint(site.storage for site in rows[nearest].sites):
            nearest -= 1
        if nearest >= max(convolution[-1:], default=0):
            _fetch(rows[nearest], rows[current], waiting, found)
    return found


def _fetch(layer: Layer, when: Layer, waiting: set[int], found: dict[int, Trip]) -> None:
    """Prefetch for `layer` as backward enters `when`."""
    wanted = {site.storage for site in layer.sites} & waiting
    waiting -= wanted
    found.update((ident, Trip(when.entered)) for ident in wanted)


def _needed_by(rows: list[Layer]) -> set[int]:
    return {site.storage for layer in rows for site in layer.sites}


def layer_synchronous(plan: Plan, trace: Trace) -> Plan:
    """The plan with a room that holds, while a layer is in its forward, no more than what stays and what it saves."""
    if not plan.groups:
        return plan
    nbytes = trace.storage_bytes
    going = {key for group in plan.groups for key in group.sites}
    largest = max(group.nbytes for group in plan.groups)
    stayed, limits = 0, dict(plan.limits)
    for layer in layers(trace):
        stayed += sum(plan.keep[site.key].enter for site in layer.sites if site.key in plan.keep)
        own = sum(nbytes[ident] for ident in {site.storage for site in layer.sites if site.key in going})
        in_forward, in_backward = limits.get(layer.sites[0].key, (plan.room, plan.room))
        limits[layer.sites[0].key] = (min(in_forward, stayed + max(own, largest)), in_backward)
    return replace(plan, limits=limits)
