"""A tensor of optimizer state whose bytes lie on NVMe.

`NvmeTensor` is a wrapper subclass: PyTorch calls its `__torch_dispatch__` for every operator that is given one. An
operator that only reads gets a temporary copy on the device. One that writes, or returns a view, first restores the
tensor to device memory for good, as whoever has a view may write by it at any time.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from torch_tiers.allocator.errors import TiersError
from torch_tiers.migrator.offload.stored import StoredGroup

_ALIASES = torch.ops.aten.detach.default, torch.ops.aten.alias.default
_TAKES_MEMORY = torch.ops.aten.set_  # of another tensor, which its schema does not tell


class NvmeParts(Protocol):
    """Where the parts of tensors are; see `NvmeState`.

    Attributes
    ----------
    directory : Path or None
        Has room for temporary files.
    """

    directory: Path | None

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held in an optimizer's step, and by who restores a tensor."""

    def check_idle(self) -> None:
        """Raise TiersError within a step."""

    def read_into(self, stored: Sequence[StoredGroup], target: Tensor) -> None:
        """Copy the parts of a tensor into a contiguous one."""

    def mark_unused(self, stored: Sequence[StoredGroup]) -> None:
        """Take note that the tensor of these parts is gone."""


class NvmePart(NamedTuple):
    """A part of a tensor: numbers that are read, updated and written at once."""

    stored: StoredGroup
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.stored.nbytes


class NvmeBytes:
    """The bytes of a contiguous tensor, in parts.

    Parameters
    ----------
    state : NvmeParts
        Where the parts are. It copies them.
    like : Tensor
        Has the tensor's shape, type and device.
    parts : list of StoredGroup
        In order.
    length : int
        Numbers of a part. The last one may have fewer.

    Attributes
    ----------
    length : int
        As given.
    restored : Tensor or None
        The tensor in device memory, once it was restored. It has no parts any more then.
    """

    def __init__(self, state: NvmeParts, like: Tensor, parts: list[StoredGroup], length: int) -> None:
        self.restored: Tensor | None = None
        self.length = length
        self._parts = parts
        self._state = state
        self._size = like.size()
        self._empty = torch.empty(0, dtype=like.dtype, device=like.device)

    def __del__(self) -> None:
        self._state.mark_unused(self._parts)

    def lies_in(self, state: NvmeParts) -> bool:
        """Whether its parts are there. Those of an earlier session's are not."""
        return self.restored is None and self._state is state

    def part_at(self, number: int) -> NvmePart:
        """Return the part that begins with this number of the tensor."""
        assert number % self.length == 0
        return NvmePart(self._parts[number // self.length], self._empty.dtype)

    def read(self) -> Tensor:
        """Return the tensor, or a copy if it is not restored."""
        if self.restored is not None:
            return self.restored
        plain = self._empty.new_empty(self._size)
        self._state.read_into(self._parts, plain)
        return plain

    def restore(self) -> Tensor:
        """Return the tensor, restored to device memory.

        Raises
        ------
        TiersError
            Within an optimizer's step, in its thread: its update would be lost.
        """
        with self._state.lock:
            if self.restored is None:
                self._state.check_idle()
                with torch.inference_mode(False):  # else no step could update it
                    self.restored = self.read()
                self._state.mark_unused(self._parts)
                self._parts = []
            return self.restored

    def to_mapped_file(self) -> Tensor:
        """Return a copy on the CPU that is mapped from a file without a name.

        So the system can write it there when memory is short, while `torch.save` holds all tensors.

        Raises
        ------
        OSError
            If the file system has no room for it.
        """
        plain = self.read()
        with tempfile.NamedTemporaryFile(prefix="tiers-", dir=self._state.directory) as file:
            # A page of a file with holes for which there is no room ends the process when it is written.
            os.posix_fallocate(file.fileno(), 0, plain.nbytes)
            mapped = torch.from_file(file.name, shared=True, size=plain.numel(), dtype=plain.dtype)
        return mapped.view(plain.size()).copy_(plain)


class NvmeTensor(torch.Tensor):
    """A tensor whose bytes lie on NVMe.

    Parameters
    ----------
    like : Tensor
        Has its shape, strides, type and device.
    contents : NvmeBytes
        Where they are.
    """

    contents: NvmeBytes

    @staticmethod
    def __new__(cls, like: Tensor, contents: NvmeBytes) -> NvmeTensor:
        """Make one."""
        made: NvmeTensor = torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.contents = contents
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _ALIASES:  # which PyTorch asks for before it does next to anything
            with torch.inference_mode(False):
                return cls(args[0], args[0].contents)
        if func is torch.ops.aten.detach_.default:  # no state has anything to be detached from
            return args[0]
        if torch.Tag.inplace_view in func.tags and func.overloadpacket is not _TAKES_MEMORY:
            raise TiersError(f"{func} would change the shape of optimizer state that lies on nvme: change a copy")
        args, kwargs = list(args), kwargs or {}
        for tensor in _written_or_viewed(func, args, kwargs):
            tensor.contents.restore()
        wrapper_of: dict[int, NvmeTensor] = {}  # by the identities of restored tensors

        def unwrap(value: Any) -> Any:
            if not isinstance(value, NvmeTensor):
                return value
            plain = value.contents.read()
            if plain is value.contents.restored:
                wrapper_of[id(plain)] = value
            return plain

        result = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
        return tree_map(lambda value: wrapper_of.get(id(value), value), result)  # of an operator in place, its own

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        try:
            return f"NvmeTensor({self.contents.read()!r})"
        except TiersError:  # as after the session: whoever looks for a fault should see the rest
            return f"NvmeTensor(size={tuple(self.size())}, dtype={self.dtype}, device='{self.device}')"

    @property
    def data(self) -> Tensor:
        """The tensor without what autograd knows of it. PyTorch asks for no operator where it is set."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if (value.size(), value.dtype, value.device) != (self.size(), self.dtype, self.device):
            raise TiersError(
                "optimizer state that lies on nvme was given memory of another size, type or device: put the new "
                "tensor into optimizer.state instead"
            )
        self.contents.restore().data = value.contents.restore() if isinstance(value, NvmeTensor) else value

    def __copy__(self) -> NvmeTensor:
        return type(self)(self, self.contents)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = self.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.contents.restored
        return (self.contents.to_mapped_file() if plain is None else plain).__reduce_ex__(protocol)

    # PyTorch does not ask for an operator here.
    def tolist(self) -> Any:
        """Return the numbers."""
        return self.contents.read().tolist()

    # Whoever has the memory's address may read and write there at any time.

    def data_ptr(self) -> int:
        """Return the address in memory."""
        return self.contents.restore().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage in memory."""
        return self.contents.restore().untyped_storage()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.contents.restore().__dlpack__(*args, **kwargs)


def _written_or_viewed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[NvmeTensor]:
    """Those of an operator's arguments that it writes, or that what it returns is a view of."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None or func.overloadpacket is _TAKES_MEMORY:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (each for each in tree_leaves(given) if isinstance(each, NvmeTensor))
