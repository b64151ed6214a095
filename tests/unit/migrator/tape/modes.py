"""What the tape is to hold, recorded in Python, by a mode and without any hurry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_tiers.migrator.tape.operators import Operator
from torch_tiers.migrator.tape.tape import Tape

SEES_INTO_MODES = TorchVersion(torch.__version__) >= "2.12"
"""Whether operators come by that a dispatch mode calls, or a subclass with one of its own."""


@dataclass(frozen=True)
class Call:
    """One operator: the shapes of its tensors, which calls wrote them last, and which outputs lie on inputs."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    producers: tuple[int | None, ...]
    aliases: tuple[bool, ...]
    results: tuple[tuple[int, ...], ...]


class Model(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._writers: dict[int, int] = {}
        self._held: list[Any] = []  # an address is not used again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:  # see `SHOWN_TO_MODES_ALONE`
            return func(*args, **kwargs)
        number, schema = len(self.calls), func._schema
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        before = [self._writers.get(_storage(each)) for each in inputs]
        shapes, strides = tuple(tuple(each.shape) for each in inputs), tuple(each.stride() for each in inputs)
        result = func(*args, **kwargs)
        outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        self._held += [each.untyped_storage() for each in inputs + outputs]
        on = {_storage(each) for each in inputs}
        for argument, given in zip(schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and not _moves(func):
                for each in tree_leaves(given):
                    self._writers[_storage(each)] = number
        for each in outputs:
            if _storage(each) not in on:
                self._writers[_storage(each)] = number
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        self.calls.append(
            Call(
                name,
                shapes,
                strides,
                tuple(before),
                tuple(_storage(each) in on for each in outputs),
                tuple(tuple(each.shape) for each in outputs),
            )
        )
        return result


def calls_of(tape: Tape) -> list[Call]:
    """The same of a tape."""
    return [_call(each) for each in tape.operators]


def _call(operator: Operator) -> Call:
    # A mode is given numbers where PyTorch makes tensors of them.
    inputs = [each for each in operator.inputs if each.storage is not None]
    outputs = [each for each in operator.outputs if each.storage is not None]
    on = {each.storage for each in inputs}
    return Call(
        operator.name,
        tuple(each.form.sizes for each in inputs if each.form and each.form.sizes is not None),
        tuple(each.form.strides for each in inputs if each.form and each.form.strides is not None),
        tuple(each.producer for each in inputs),
        tuple(each.storage in on for each in outputs),
        tuple(each.form.sizes for each in outputs if each.form and each.form.sizes is not None),
    )


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _moves(func: Any) -> bool:
    return torch.Tag.inplace_view in func.tags
