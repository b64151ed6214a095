"""How much HBM an optimizer's state may take, found when it makes its first step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from torch_tiers.allocator.pages import StateRoom
from torch_tiers.migrator.program import weights
from torch_tiers.migrator.program.by_parameter import BY_ELEMENT, may_be_split
from torch_tiers.migrator.saved.saver import Saver
from torch_tiers.migrator.state.slices import buffer_bytes, in_chunks, largest

COPIES = 2  # of each parameter that trains: what Adam keeps, which is the most that is common


def state_rooms(optimizer: torch.optim.Optimizer, saver: Saver | None) -> dict[int, StateRoom]:
    """Return the room of each GPU by its number, if this thread's iteration there is recorded.

    All that the last forward and backward used stays in HBM, except saved tensors, which can move.
    """
    rooms = {}
    for mover in saver.movers.armed if saver is not None else ():
        device, meter = mover.engine.compute.device, mover.engine.meter
        others = 0 if meter is None else meter.others_so_far()
        if device.type == "cuda" and others:
            trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            expected = COPIES * weights.bytes_on(device, weights.plain_tensors(trained))
            room = max(0, mover.budget - others)
            if room < expected and may_be_split(optimizer):
                on_it = (p for p in trained if p.device == device)
                room = max(0, room - _buffer(on_it, mover.budget, may_be_cut=type(optimizer) in BY_ELEMENT))
            rooms[device.index] = StateRoom(room, expected)
    return rooms


def _buffer(trained: Iterable[Tensor], budget: int, *, may_be_cut: bool) -> int:
    """Bytes of the buffer by which state that lies in DRAM comes to HBM."""
    sizes = [COPIES * parameter.nbytes for parameter in weights.plain_tensors(trained)]
    parts = [in_chunks(nbytes) if may_be_cut else [nbytes] for nbytes in sizes]
    return buffer_bytes([nbytes for of in parts for nbytes in of if nbytes <= largest(budget)])
