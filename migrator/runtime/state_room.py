"""How much HBM the state of an optimizer may take, which makes its first step."""

from __future__ import annotations

import torch

from torch_tiers.allocator.pages import StateRoom
from torch_tiers.migrator.program import weights
from torch_tiers.migrator.saved.saver import Saver
from torch_tiers.migrator.state.slices import ABREAST, SLICE

COPIES = 2  # of each parameter that trains: what Adam keeps, which is the most that is common


def state_rooms(optimizer: torch.optim.Optimizer, saver: Saver | None) -> dict[int, StateRoom]:
    """Return the room of each GPU by its number, if this thread's iteration there is recorded.

    What else was in use in the forward and backward that are over stays in HBM, but for what was saved: that can move.
    """
    rooms = {}
    for mover in saver.movers.armed if saver is not None else ():
        device, meter = mover.engine.compute.device, mover.engine.meter
        others = 0 if meter is None else meter.others_so_far()
        if device.type == "cuda" and others:
            trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            expected = COPIES * weights.bytes_on(device, weights.plain_tensors(trained))
            room = max(0, mover.budget - others)
            if room < expected:  # the rest comes to HBM for its updates, by a buffer
                room = max(0, room - ABREAST * SLICE)
            rooms[device.index] = StateRoom(room, expected)
    return rooms
