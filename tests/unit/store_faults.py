"""A backend that does what drives do on bad days."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping

import torch

from torch_tiers.allocator.nvme.backend import BLOCK, Backend
from torch_tiers.allocator.sizes import round_up

Move = Callable[[torch.Tensor, int], int]
Fault = Callable[[Move, torch.Tensor, int], int]


def fail(code: int) -> Fault:
    """Raise an OSError such as ``errno.EIO``."""

    def fault(move: Move, block: torch.Tensor, offset: int) -> int:
        raise OSError(code, os.strerror(code))

    return fault


def short(nbytes: int) -> Fault:
    """Transfer and report only `nbytes`."""

    def fault(move: Move, block: torch.Tensor, offset: int) -> int:
        # The drive moves whole blocks, whatever it reports.
        return min(move(block[: round_up(nbytes, BLOCK)], offset), nbytes) if nbytes else 0

    return fault


def flip(bit: int) -> Fault:
    """Read with one bit turned over, and report success."""

    def fault(move: Move, block: torch.Tensor, offset: int) -> int:
        count = move(block, offset)
        block[bit // 8] ^= 1 << bit % 8
        return count

    return fault


class FaultyFile:
    """Wraps a backend; the n-th request of each kind, counted from 0, meets its fault.

    With ``twice`` the next one at the same offset meets it again: a store tries what failed once more.
    ``full_at`` is the size at which the disk is full: growing past it raises ENOSPC.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        reads: Mapping[int, Fault] | None = None,
        writes: Mapping[int, Fault] | None = None,
        twice: bool = False,
        full_at: int | None = None,
    ) -> None:
        self._inner = inner
        self.path = inner.path
        self.device_memory = inner.device_memory
        self._faults = {"read": reads or {}, "write": writes or {}}
        self.count = {"read": 0, "write": 0}
        self._twice = twice
        self._again: dict[tuple[str, int], Fault] = {}
        self._full_at = full_at
        self._lock = threading.Lock()

    @property
    def bounced(self) -> int:
        return self._inner.bounced

    @property
    def met(self) -> int:
        """How many faults were met."""
        return sum(n < self.count[kind] for kind, faults in self._faults.items() for n in faults)

    def grow(self, size: int) -> None:
        if self._full_at is not None and size > self._full_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._inner.grow(size)

    def pread(self, block: torch.Tensor, offset: int) -> int:
        return self._meet("read", self._inner.pread, block, offset)

    def pwrite(self, block: torch.Tensor, offset: int) -> int:
        return self._meet("write", self._inner.pwrite, block, offset)

    def close(self) -> None:
        self._inner.close()

    def _meet(self, kind: str, move: Move, block: torch.Tensor, offset: int) -> int:
        with self._lock:
            fault = again = self._again.pop((kind, offset), None)
            if again is None:
                fault = self._faults[kind].get(self.count[kind])
                self.count[kind] += 1
            if self._twice and fault is not None and again is None:
                self._again[kind, offset] = fault
        return move(block, offset) if fault is None else fault(move, block, offset)
