"""Pieces: the bytes that one copy of a lane moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from torch_tiers.allocator.sizes import MiB

SLOT = 512
"""Alignment of a storage within its group, in bytes: PyTorch's own for CUDA blocks. Kernels choose
their code path by alignment, so a tensor that comes back must be aligned as it was, or results differ."""

FULL_SPEED = 1 * MiB  # a plain copy of this size, a call of its own, reaches 90% of the link


class Piece(NamedTuple):
    """Bytes to copy: `nbytes` of them from byte `start` of `source` to byte `at` of `target`."""

    target: torch.UntypedStorage
    at: int
    source: torch.UntypedStorage
    start: int
    nbytes: int


class Member(Protocol):
    """A storage of a group, or the part of one: `nbytes` from byte `low` on, whose place is at byte `offset` of it.

    Its `alias` holds the program's memory.
    """

    alias: torch.Tensor
    offset: int

    @property
    def low(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Leaving:
    """What of a group goes out of the program's memory into a block: a piece for each member.

    Attributes
    ----------
    members : list of Member
        Which have their places in the group, and still their memory: this is good for one call of `Lane.copy`.
    block : Tensor
        Flat and of uint8.
    nbytes : int
        Of all members.
    spans : callable
        `Tensors.spans` of `migrator.offload.tensors`.
    """

    members: Sequence[Member]
    block: torch.Tensor
    nbytes: int
    spans: Callable[[Any, int], bytes]

    def __iter__(self) -> Iterator[Piece]:
        target, at = self.block.untyped_storage(), int(self.block.storage_offset())
        for saved in self.members:
            yield Piece(target, at + saved.offset, saved.alias.untyped_storage(), saved.low, saved.nbytes)


def whole(target: torch.Tensor, source: torch.Tensor) -> Piece:
    """All of `source`, to `target`: flat uint8 tensors of one size."""
    at, start = int(target.storage_offset()), int(source.storage_offset())
    return Piece(target.untyped_storage(), at, source.untyped_storage(), start, target.numel())


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, flat."""
    return flat(tensor.untyped_storage(), first_byte(tensor), tensor.nbytes)


def first_byte(tensor: torch.Tensor) -> int:
    """Where a tensor begins in its storage."""
    return int(tensor.storage_offset()) * tensor.element_size()


def flat(storage: torch.UntypedStorage, first: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """The bytes ``[first, first + nbytes)`` of a storage as a flat tensor."""
    size = dtype.itemsize
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, first // size, (nbytes // size,), (1,))


def at_full_speed(pieces: Iterable[Piece]) -> bool:
    """Whether the time that copying `pieces` takes is that of the link, and not of what there is around it."""
    small = sum(piece.nbytes for piece in pieces if piece.nbytes < FULL_SPEED)
    return 8 * small <= sum(piece.nbytes for piece in pieces)
