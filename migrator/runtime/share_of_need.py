"""Budgets that are a share of what a program needs: the first plans tell how much that is, and others are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from torch_tiers.allocator.errors import TiersError
from torch_tiers.migrator.controller.planned import needs
from torch_tiers.migrator.model.plan import NoPlanFits
from torch_tiers.migrator.runtime.devices import Devices
from torch_tiers.migrator.runtime.options import Options
from torch_tiers.migrator.runtime.streaming import Streaming
from torch_tiers.migrator.saved.movers import Movers


def settle_budgets(
    movers: Movers, devices: Devices, streaming: Streaming, options: Options, refuse: Callable[[TiersError], NoReturn]
) -> bool:
    """Settle the budgets of a thread's devices as soon as it is known what they need; return whether plans changed.

    To be called when an iteration is over. A mover that was made with another budget is replaced by one that plans for
    what the old one has recorded. What the old one has moved of a graph that is still alive comes back as before.
    Where a share is too small for any plan the program is to `refuse` it.
    """
    if options.settle_budget is None:
        return False
    replaced = False
    for mover in movers.armed:
        device, learner = mover.engine.compute.device, mover.learner
        shared = devices.opened[device]
        if shared.provisional and learner.complete and all(trace.others for trace in learner.traces):
            devices.settle_budget(device, max(needs(trace, shared.links) for trace in learner.traces), options)
            streaming.budget_changed()
        room = devices.opened[device].room
        if mover.budget == room:
            continue
        if (pages := options.pages()) is not None:
            pages.expect_new_plans(device, room)
        try:
            movers.replace(device)
        except NoPlanFits as error:
            refuse(error.out_of(room))
        replaced = True
    return replaced
