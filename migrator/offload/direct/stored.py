"""A stored group of the direct way: the bytes of one group, in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from torch_tiers.allocator.nvme.extent import NvmeExtent
from torch_tiers.migrator.streams.pieces import Piece
from torch_tiers.migrator.streams.promised import PromisedEvent


@dataclass(eq=False, slots=True)
class Chunk:
    """A part of a stored group.

    Attributes
    ----------
    start, nbytes : int
        Which bytes of it.
    extent : NvmeExtent or None
        Where they are on the drives.
    rescued : Tensor or None
        The bytes, where the drives did not take them.
    written : Future
        Done when they are in either place.
    """

    start: int
    nbytes: int
    extent: NvmeExtent | None
    rescued: torch.Tensor | None = None
    written: Future[None] = field(default_factory=Future)


@dataclass(eq=False, slots=True)
class DirectStoredGroup:
    """The bytes of a group that goes the direct way.

    Attributes
    ----------
    filled : PromisedEvent
        The copies out of the program's memory.
    returned : PromisedEvent or None
        The last copies into a buffer.
    dropped : bool
        Nobody needs the bytes any more.
    """

    nbytes: int
    chunks: tuple[Chunk, ...]
    filled: PromisedEvent
    returned: PromisedEvent | None = None
    dropped: bool = False

    @property
    def is_asked_for(self) -> bool:
        """Whether no thread will ask a lane for copies of the program's memory any more."""
        return self.filled.is_there and (self.returned is None or self.returned.is_there)

    def under_way(self) -> list[Future[Any]]:
        """What threads and drives still do with it."""
        promised = (self.filled, *(() if self.returned is None else (self.returned,)))
        futures: list[Future[Any]] = [each.asked for each in promised]
        futures += (chunk.written for chunk in self.chunks)
        return [future for future in futures if not future.done()]


class Source(NamedTuple):
    """Bytes of a group in the program's memory: `nbytes` from byte `start` of `storage`, for byte `at` of the group."""

    at: int
    storage: torch.UntypedStorage
    start: int
    nbytes: int


def cut(sources: Iterable[Source], chunks: Sequence[Chunk]) -> list[list[Source]]:
    """Sort bytes of a group by the chunk that they belong to; what lies across a border is cut there.

    `Source.at` counts from the chunk's first byte in the result.
    """
    parts: list[list[Source]] = [[] for _ in chunks]
    size = chunks[0].nbytes if chunks else 0
    for at, storage, start, nbytes in sources:
        done = 0
        while done < nbytes:
            number, within = divmod(at + done, size)
            part = min(nbytes - done, size - within)
            parts[number].append(Source(within, storage, start + done, part))
            done += part
    return parts


def into(slot: torch.Tensor, sources: Iterable[Source]) -> list[Piece]:
    """Pieces that bring a chunk's bytes into a slot."""
    target, first = slot.untyped_storage(), int(slot.storage_offset())
    return [Piece(target, first + at, storage, start, nbytes) for at, storage, start, nbytes in sources]
