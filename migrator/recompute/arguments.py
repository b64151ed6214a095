"""Arguments of a forward, so that it can be given them again: copies of containers, which the program may change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

_PLAIN = (Tensor, bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size)


def copy_of(arg: Any) -> Any:
    """An argument that stays as it is when the program changes the containers in it.

    Raises
    ------
    TypeError
        If it is of a kind of which that cannot be told, such as a cache of keys and values.
    """
    if isinstance(arg, _PLAIN):
        return arg
    if type(arg) in (tuple, list, set):
        return type(arg)(map(copy_of, arg))
    if type(arg) is dict:
        return {name: copy_of(value) for name, value in arg.items()}
    raise TypeError(type(arg).__name__)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among what `copy_of` has copied."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (tuple, list, set):
            yield from tensors_in(value)
        elif type(value) is dict:
            yield from tensors_in(value.values())


def changeable(arguments: Iterable[Any]) -> list[Tensor] | None:
    """The tensors that a forward is given; None if it could not be given these arguments again as they were."""
    try:
        return list(tensors_in([copy_of(argument) for argument in arguments]))
    except TypeError:
        return None
