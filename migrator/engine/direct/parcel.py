"""A parcel of the direct way: the bytes of one group, in chunks, and what its threads will have asked lanes for."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from torch_tiers.allocator.nvme.store import NvmeExtent
from torch_tiers.migrator.lanes import Event, Piece


class Asked:
    """An event that is not there yet: a thread of the direct way will ask a lane for it.

    Attributes
    ----------
    lane : str
        What is waited for with it.
    """

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self._is_there = threading.Event()
        self._event: Event | None = None
        self._error: BaseException | None = None

    def set(self, event: Event | None) -> None:
        """The lane was asked for the last copy; None if there was nothing to copy."""
        self._event = event
        self._is_there.set()

    def fail(self, error: BaseException) -> None:
        """The lane was not asked for all copies, because of `error`, and carries none of them out any more."""
        self._error = error
        self._is_there.set()

    @property
    def is_there(self) -> bool:
        """Whether the thread is through with it."""
        return self._is_there.is_set()

    def event(self) -> Event | None:
        """Block the host until the lane was asked; the event of the last copy."""
        self._is_there.wait()
        if self._error is not None:
            raise self._error
        return self._event

    def settled(self) -> Event | None:
        """Block the host until it is known what became of it; the event of the last copy, if all were asked for."""
        self._is_there.wait()
        return None if self._error is not None else self._event

    def query(self) -> bool:
        """Whether the copies are over; raises what kept the lane from being asked."""
        if not self.is_there:
            return False
        event = self.event()
        return event is None or event.query()

    def synchronize(self) -> None:
        """Block the host until they are."""
        if (event := self.event()) is not None:
            event.synchronize()


@dataclass(eq=False, slots=True)
class Chunk:
    """A part of a parcel.

    Attributes
    ----------
    start, nbytes : int
        Which bytes of it.
    extent : NvmeExtent or None
        Where they are on the drives.
    rescued : Tensor or None
        The bytes, where the drives did not take them.
    stored : Future
        Done when they are in either place.
    """

    start: int
    nbytes: int
    extent: NvmeExtent | None
    rescued: torch.Tensor | None = None
    stored: Future[None] = field(default_factory=Future)


@dataclass(eq=False, slots=True)
class DirectParcel:
    """The bytes of a group that goes the direct way.

    Attributes
    ----------
    filled : Asked
        The copies out of the program's memory.
    lent : Asked or None
        The last copies into a buffer.
    dropped : bool
        Nobody needs the bytes any more.
    """

    nbytes: int
    chunks: tuple[Chunk, ...]
    filled: Asked
    lent: Asked | None = None
    dropped: bool = False

    def in_use(self) -> bool:
        """Whether a thread or a drive still works on it."""
        asked = self.filled if self.lent is None else self.lent
        return not asked.is_there or not all(chunk.stored.done() for chunk in self.chunks)


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
