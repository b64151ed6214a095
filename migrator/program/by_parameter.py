"""Optimizers that update each parameter by itself, so that a step is the same if it is made in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, optim

from torch_tiers.migrator.program.subclasses import is_dtensor, own_memory
from torch_tiers.migrator.program.weights import tensors_in

BY_PARAMETER: tuple[type[optim.Optimizer], ...] = tuple(
    getattr(optim, name)
    for name in (
        *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "SGD"),
    )
    if hasattr(optim, name)  # the newest are missing in older releases
)

BY_ELEMENT = tuple(kind for kind in BY_PARAMETER if kind.__name__ not in ("Adafactor", "Muon"))
"""Those of them that update each number by itself: a part of a parameter is updated as in the whole, and a shard by its
rank alone. Adafactor and Muon take means and products over a whole parameter."""

Step: TypeAlias = Callable[[optim.Optimizer], Any]
"""PyTorch's own step of an optimizer, without hooks and without a closure."""


def may_be_split(optimizer: optim.Optimizer) -> bool:
    """Whether a step may be made in parts.

    Optimizers choose their kernels by the types and devices of a group's parameters, and by whether a gradient of it is
    sparse. A part of a mixed group could get other kernels than the whole, so it is not split. Nor is a step that
    updates something twice, whose order would be another. Nor one of DTensors for which ranks communicate: each rank
    has its own parts, and their order would differ between ranks. Nor one of which the program has replaced what finds
    the state: that may know the optimizer itself, and no part of it.
    """
    return (
        type(optimizer) in BY_PARAMETER
        and "_init_group" not in vars(optimizer)
        and all(_are_alike(group) for group in optimizer.param_groups)
        and _is_local(optimizer)
        and not _is_anything_shared(optimizer)
    )


def _are_alike(group: Mapping[str, Any]) -> bool:
    parameters: list[Tensor] = group["params"]
    return (
        not group.get("differentiable")
        and len({parameter.device for parameter in parameters}) <= 1
        and len({is_dtensor(parameter) for parameter in parameters}) <= 1
        and all(own_memory(parameter) is not None for parameter in parameters)
        and all(p.grad is None or p.grad.layout is torch.strided for p in parameters)
    )


def _is_local(optimizer: optim.Optimizer) -> bool:
    """Whether a step needs nothing of other ranks: each number of a DTensor is updated by what its rank has."""
    distributed = [p for group in optimizer.param_groups for p in group["params"] if is_dtensor(p)]
    values = (value for group in optimizer.param_groups for value in group.values())
    if distributed and (type(optimizer) not in BY_ELEMENT or any(is_dtensor(value) for value in values)):
        return False
    return all(
        not any(placement.is_partial() for placement in parameter.placements)
        and all(
            of.placements == parameter.placements and of.device_mesh == parameter.device_mesh
            for of in (parameter.grad, *optimizer.state.get(parameter, {}).values())
            if is_dtensor(of)
        )
        for parameter in distributed
    )


def _is_anything_shared(optimizer: optim.Optimizer) -> bool:
    """Whether a parameter comes twice, tensors of state share a storage, or parameters, gradients and state do.

    Parameters may be views of one storage, and gradients of another.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    addresses = [memory.data_ptr() for memory in _memories(parameters) if memory.numel()]
    kept = [memory.untyped_storage()._cdata for memory in _memories(tensors_in(optimizer.state))]
    updated = {memory.untyped_storage()._cdata for memory in _memories(parameters)}
    gradients = {memory.untyped_storage()._cdata for memory in _memories(each.grad for each in parameters)}
    is_twice = len(set(addresses)) < len(addresses) or len(set(kept)) < len(kept)
    return is_twice or not (updated | gradients).isdisjoint(kept) or not updated.isdisjoint(gradients)


def _memories(values: Iterable[object]) -> Iterator[Tensor]:
    return (memory for value in values if (memory := own_memory(value)) is not None)


def makes_state(optimizer: optim.Optimizer, group: int, state: Mapping[str, Any]) -> bool:
    """Whether the next step makes state for a parameter of a group, which has this so far.

    SGD with momentum does where the buffer is missing, as momentum may have been switched on later. Others make all
    they have at once.
    """
    if isinstance(optimizer, optim.SGD):
        return optimizer.param_groups[group]["momentum"] != 0 and state.get("momentum_buffer") is None
    return not state


def step_over(
    parameters: Mapping[int, Sequence[Tensor]],
    optimizer: optim.Optimizer,
    step: Step,
    state: Mapping[Tensor, Any] | None = None,
) -> None:
    """Have an optimizer update these parameters alone, by the number of their group, with `state` for its own.

    That is done by an optimizer that is as this one in all else. The program may look at its own meanwhile, as a
    signal's handler does that saves it.
    """
    part = object.__new__(type(optimizer))
    attributes = vars(part)
    attributes.update(vars(optimizer))
    attributes["param_groups"] = [
        {**group, "params": list(parameters.get(index, ()))} for index, group in enumerate(optimizer.param_groups)
    ]
    if state is not None:
        attributes["state"] = state
    step(part)
    # What it knows of itself by now, such as that it has warned.
    own = ("param_groups", "state")
    vars(optimizer).update((name, value) for name, value in attributes.items() if name not in own)
