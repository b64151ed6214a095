"""Optimizers that update each parameter by itself, so that a step is the same if it is made in parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn, optim

BY_PARAMETER: tuple[type[optim.Optimizer], ...] = tuple(
    getattr(optim, name)
    for name in (
        *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "SGD"),
    )
    if hasattr(optim, name)  # the newest are missing in older releases
)


def may_be_split(optimizer: optim.Optimizer) -> bool:
    """Whether a step may be made in parts.

    Optimizers choose their kernels by the types and devices of a group's parameters, and by whether a gradient of it is
    sparse. A part of a mixed group could get other kernels than the whole, so it is not split.
    """
    return type(optimizer) in BY_PARAMETER and all(
        not group.get("differentiable")
        and len({parameter.device for parameter in group["params"]}) <= 1
        and all(type(parameter) in (Tensor, nn.Parameter) for parameter in group["params"])
        and all(p.grad is None or p.grad.layout is torch.strided for p in group["params"])
        for group in optimizer.param_groups
    )


@contextmanager
def only(optimizer: optim.Optimizer, parameters: Mapping[int, Sequence[Tensor]]) -> Iterator[None]:
    """Have the optimizer know these parameters alone, by the number of their group."""
    groups = optimizer.param_groups
    whole = [group["params"] for group in groups]
    try:
        for index, group in enumerate(groups):
            group["params"] = list(parameters.get(index, ()))
        yield
    finally:
        for group, parameters_of_group in zip(groups, whole, strict=True):
            group["params"] = parameters_of_group
