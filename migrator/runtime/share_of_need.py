"""Budgets that are a share of what a program needs: the first plans tell how much that is, and learning begins anew."""

from __future__ import annotations

from torch_tiers.migrator.controller.planned import needs
from torch_tiers.migrator.runtime.devices import Devices
from torch_tiers.migrator.runtime.options import Options
from torch_tiers.migrator.runtime.streaming import Streaming
from torch_tiers.migrator.saved.movers import Movers


def settle_budgets(movers: Movers, devices: Devices, streaming: Streaming, options: Options) -> bool:
    """Settle the budgets of a thread's devices as soon as it is known what they need; return whether plans are gone.

    To be called when an iteration is over. A mover that was made with another budget is removed: the next tensor that
    is saved on its device has another one made, which learns anew. What the old one has moved of a graph that is still
    alive comes back as before.
    """
    if options.settle_budget is None:
        return False
    removed = False
    for mover in movers.armed:
        device, learner = mover.engine.compute.device, mover.learner
        shared = devices.opened[device]
        if shared.provisional and learner.complete and all(trace.others for trace in learner.traces):
            devices.settle_budget(device, max(needs(trace, shared.links) for trace in learner.traces), options)
            streaming.budget_changed()
        room = devices.opened[device].room
        if mover.budget == room:
            continue
        movers.remove(device)
        removed = True
        if (pages := options.pages()) is not None:
            pages.expect_new_plans(device, room)
    return removed
