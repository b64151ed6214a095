"""A tensor of optimizer state whose bytes lie on NVMe.

It is a wrapper subclass, so every operator that is given one comes by here. One that only reads gets a copy, for as
long as it runs. One that writes, or returns a view, has the tensor restored to memory for good: whoever has the view
may write by it at any time.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from torch_tiers.migrator.offload.stored import StoredGroup

if TYPE_CHECKING:
    from torch_tiers.migrator.state.nvme_state import NvmeState

_ALIASES = torch.ops.aten.detach.default, torch.ops.aten.alias.default


class NvmePart(NamedTuple):
    """A part of a tensor: numbers of one type that are read, updated and written at once."""

    stored: StoredGroup
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.stored.nbytes


class BytesOnNvme:
    """The bytes of a contiguous tensor, in parts.

    Parameters
    ----------
    state : NvmeState
        Reads them.
    like : Tensor
        Has the size, type and device.
    parts : list of StoredGroup
        Of `length` numbers each, but for the last.

    Attributes
    ----------
    restored : Tensor or None
        The tensor, once it was restored to memory. It has no parts any more then.
    """

    def __init__(self, state: NvmeState, like: Tensor, parts: list[StoredGroup], length: int) -> None:
        self.restored: Tensor | None = None
        self.length = length
        self._parts = parts
        self._state = state
        self._size = like.size()
        self._empty = torch.empty(0, dtype=like.dtype, device=like.device)

    def __del__(self) -> None:
        self._state.forget(self._parts)

    def part_at(self, number: int) -> NvmePart:
        """The part that begins with this number."""
        return NvmePart(self._parts[number // self.length], self._empty.dtype)

    def read(self) -> Tensor:
        """Return the tensor, or a copy if it is not restored."""
        if self.restored is not None:
            return self.restored
        copy = self._empty.new_empty(self._size)
        self._state.read_into(self._parts, copy)
        return copy

    def restore(self) -> Tensor:
        """Return the tensor, restored to memory."""
        if self.restored is None:
            self.restored = self.read()
            self._state.forget(self._parts)
            self._parts = []
        return self.restored

    def mapped(self) -> Tensor:
        """Return a copy on the CPU, in a file that the system can write it to when memory is short."""
        plain = self.read()
        with tempfile.NamedTemporaryFile(
            prefix="tiers-", dir=self._state.directory
        ) as file:  # once mapped, it needs no name
            os.truncate(file.name, plain.nbytes)
            copy = torch.from_file(file.name, shared=True, size=plain.numel(), dtype=plain.dtype)
        return copy.view(plain.size()).copy_(plain)


class NvmeTensor(torch.Tensor):
    """A tensor whose bytes lie on NVMe.

    Parameters
    ----------
    like : Tensor
        Has its shape, strides, type and device.
    kept : BytesOnNvme
        Where they are.
    """

    kept: BytesOnNvme

    @staticmethod
    def __new__(cls, like: Tensor, kept: BytesOnNvme) -> NvmeTensor:
        """Make one."""
        made: NvmeTensor = torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.kept = kept
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _ALIASES:  # which PyTorch asks for before it does next to anything
            return cls(args[0], args[0].kept)
        args, kwargs = list(args), kwargs or {}
        for tensor in _those_that_stay(func, args, kwargs):
            tensor.kept.restore()
        wrapped: dict[int, NvmeTensor] = {}

        def unwrap(value: Any) -> Any:
            if not isinstance(value, NvmeTensor):
                return value
            plain = value.kept.read()
            if plain is value.kept.restored:
                wrapped[id(plain)] = value
            return plain

        result = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
        return tree_map(lambda value: wrapped.get(id(value), value), result)  # of an operator in place, its own

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"NvmeTensor({self.kept.read()!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.kept.read(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # torch.save holds all that it writes until it has written it.
        return self.kept.mapped().__reduce_ex__(protocol)

    def tolist(self) -> Any:
        """Return the numbers."""
        return self.kept.read().tolist()

    # Whoever has the memory's address may read and write there at any time.

    def data_ptr(self) -> int:
        """Return the address in memory."""
        return self.kept.restore().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage in memory."""
        return self.kept.restore().untyped_storage()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.kept.restore().__dlpack__(*args, **kwargs)


def _those_that_stay(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[NvmeTensor]:
    """Those of an operator's arguments that it writes, or that what it returns is a view of."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (each for each in tree_leaves(given) if isinstance(each, NvmeTensor))
