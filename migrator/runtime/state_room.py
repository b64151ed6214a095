"""How much HBM an optimizer's state may take: once an iteration was recorded, and before that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from torch_tiers.allocator.pages import PageAllocator, StateRoom
from torch_tiers.migrator.program import weights
from torch_tiers.migrator.program.by_parameter import BY_ELEMENT, may_be_split
from torch_tiers.migrator.saved.saver import Saver
from torch_tiers.migrator.state.slices import buffer_bytes, in_chunks, largest

COPIES = 2  # of each parameter that trains: what Adam keeps, which is the most that is common


def state_rooms(optimizer: Optimizer, saver: Saver | None) -> dict[int, StateRoom]:
    """Return the room of each GPU by its number, if this thread's iteration there is recorded.

    All that the last forward and backward used stays in HBM, except saved tensors, which can move.
    """
    recorded = _recorded(saver)
    return {device.index: _room(optimizer, device, budget, budget - others) for device, budget, others in recorded}


def shortages(optimizer: Optimizer, saver: Saver | None) -> dict[torch.device, int]:
    """Return the bytes by which the last forward and backward exceeded each GPU's budget, beside state in HBM."""
    found = {}
    for device, budget, others in _recorded(saver):
        if others > budget:
            found[device] = others - budget + _buffer_bytes(optimizer, device, budget)
    return found


def shortages_before_training(
    optimizer: Optimizer, masters: Sequence[Tensor], parameters: Sequence[Tensor], pages: PageAllocator
) -> dict[torch.device, int]:
    """Return the bytes that each GPU will lack, whatever activations need, if an optimizer's `masters` stay in HBM.

    What is there stays, too, and gradients of the models' `parameters` come, and the optimizer's state.
    """
    found = {}
    for device in {master.device for master in masters}:
        if (residence := pages.residence(device)) is None:
            continue
        residence.count_state()
        there, budget = pages.in_use(device) - residence.state, pages.limit(device)
        gradients = weights.bytes_on(device, (each for each in parameters if each.requires_grad and each.grad is None))
        made = 0 if optimizer.state else COPIES * weights.bytes_on(device, masters)
        lacking = there + gradients + made + _buffer_bytes(optimizer, device, budget) - budget
        if lacking > 0:
            found[device] = lacking
    return found


def copies_in(given: object, optimizer: Optimizer) -> float:
    """Return how many times as large as what it trains the state is that an optimizer loads from a state dict.

    Where that cannot be told it is `COPIES`: PyTorch will say what is wrong with the state dict.
    """
    parameters: list[Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    try:
        state, groups = given["state"], given["param_groups"]  # type: ignore[index]
        numbers = [number for group in groups for number in group["params"]]
        nbytes = sum(
            tensor.numel() * parameter.element_size()  # it is cast to the parameter's type
            for number, parameter in zip(numbers, parameters, strict=True)
            for tensor in weights.tensors_in(state.get(number))
        )
    except (AttributeError, LookupError, TypeError, ValueError):
        return COPIES
    return nbytes / max(1, sum(parameter.nbytes for parameter in parameters if parameter.requires_grad))


def rooms_before_training(optimizer: Optimizer, pages: PageAllocator, copies: float) -> dict[int, StateRoom]:
    """Return the room of each GPU by its number for state that is loaded, in place of what there is.

    That is so many `copies` of the parameters. All else that is there leaves it, and gradients as large as the weights.
    What activations need is not known before an iteration, which makes up for that with `shortages`.
    """
    rooms = {}
    for device in {parameter.device for group in optimizer.param_groups for parameter in group["params"]}:
        if device.type == "cuda" and (budget := pages.limit(device)):
            gradients = weights.bytes_on(device, _trained(optimizer, device, without_gradient=True))
            replaced = weights.bytes_on(device, weights.plain_tensors(weights.tensors_in(optimizer.state)))
            free = budget - pages.in_use(device) - gradients + replaced
            rooms[device.index] = _room(optimizer, device, budget, free, copies)
    return rooms


def _recorded(saver: Saver | None) -> Iterator[tuple[torch.device, int, int]]:
    """The GPUs on which an iteration is recorded, the budget, and the most in use so far without saved tensors.

    That includes what a program makes between its backward and the step, such as gradients of another type.
    """
    for mover in saver.movers.armed if saver is not None else ():
        device, meter, saved = mover.engine.compute.device, mover.engine.meter, mover.engine.hbm
        others = 0 if meter is None else meter.others_so_far(saved.resident + saved.used_up)
        if device.type == "cuda" and others:
            yield device, mover.budget, others


def _room(optimizer: Optimizer, device: torch.device, budget: int, free: int, copies: float = COPIES) -> StateRoom:
    """The room for state in so many free bytes; a buffer takes a part of them, if not all of it has room."""
    expected = int(copies * weights.bytes_on(device, _trained(optimizer, device)))
    if free < expected:
        free -= _buffer_bytes(optimizer, device, budget, copies)
    return StateRoom(max(0, free), expected)


def _buffer_bytes(optimizer: Optimizer, device: torch.device, budget: int, copies: float = COPIES) -> int:
    """Bytes of the buffer by which state that lies in DRAM comes to HBM; 0 if none does."""
    if not may_be_split(optimizer):
        return 0
    sizes = [int(copies * tensor.nbytes) for tensor in _trained(optimizer, device)]
    parts = [in_chunks(nbytes) if type(optimizer) in BY_ELEMENT else [nbytes] for nbytes in sizes]
    return buffer_bytes([nbytes for of in parts for nbytes in of if nbytes <= largest(budget)])


def _trained(optimizer: Optimizer, device: torch.device, *, without_gradient: bool = False) -> Iterator[Tensor]:
    """The plain tensors of a device that an optimizer trains; or those of them that have no gradient now."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        wanted = parameter.requires_grad and parameter.device == device
        if wanted and not (without_gradient and parameter.grad is not None):
            yield from weights.plain_tensors([parameter])
