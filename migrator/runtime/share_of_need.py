"""Budgets that are a share of what a program needs: the first plan tells how much that is, and learning begins anew."""

from __future__ import annotations

from torch_tiers.migrator.controller.planned import needs
from torch_tiers.migrator.runtime.devices import Devices
from torch_tiers.migrator.runtime.options import Options
from torch_tiers.migrator.saved.movers import Movers


def settle(movers: Movers, devices: Devices, options: Options) -> bool:
    """Settle the budgets of a thread's devices as soon as it is known what they need; return whether any was.

    To be called when an iteration is over. A mover with another budget is taken off: the next tensor that is saved on
    its device has another one made. What it has moved of a graph that is still alive comes back as before.
    """
    if options.share is None:
        return False
    settled = False
    for mover in movers.armed:
        device, traces = mover.engine.compute.device, mover.learner.traces
        shared = devices.opened[device]
        if not shared.settled and mover.learner.complete and all(trace.others for trace in traces):
            devices.settle(device, max(needs(trace, shared.links) for trace in traces), options)
        room = devices.opened[device].room
        if mover.budget == room:
            continue
        movers.take_off(device)
        settled = True
        if (pages := options.pages()) is not None:
            pages.expect_new_plans(device, room)
    return settled
