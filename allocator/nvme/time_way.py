"""Times one way between GPU memory and a directory, as a program: prints a line of JSON, see `speeds`."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

from torch_tiers.allocator.nvme.backend import read_all, write_all
from torch_tiers.allocator.nvme.cufile import deregister, register
from torch_tiers.allocator.nvme.device import DeviceMemory
from torch_tiers.allocator.nvme.kvikio import KvikioFile, Mode
from torch_tiers.allocator.nvme.posix import PosixFile
from torch_tiers.allocator.nvme.ways import RING
from torch_tiers.allocator.sizes import MiB

CHUNK = 8 * MiB
SLOTS = RING // CHUNK
_ROUNDS = 3


class Mover(Protocol):
    """Moves slots of `ring`, which lies in GPU memory, to and from a file of two times its size."""

    ring: torch.Tensor

    def write(self, slot: int, offset: int) -> None:
        """Write a slot at `offset`; returns when that is done."""

    def read(self, slot: int, offset: int) -> None:
        """Read a slot from `offset`; returns when that is done."""

    def close(self) -> None:
        """Free the memory and close the file."""


class ThroughHost:
    """Through pinned memory: one slot is copied while others are on the drive."""

    def __init__(self, directory: Path) -> None:
        self._file = PosixFile(directory)
        self._file.grow(2 * RING)
        self.ring = torch.empty(RING, dtype=torch.uint8, device="cuda")
        self._host = torch.empty(RING, dtype=torch.uint8, pin_memory=True)
        self._streams = [torch.cuda.Stream() for _ in range(SLOTS)]

    def write(self, slot: int, offset: int) -> None:  # noqa: D102
        at = _of(slot)
        self._copy(slot, self._host[at], self.ring[at])
        write_all(self._file, self._host[at], offset)

    def read(self, slot: int, offset: int) -> None:  # noqa: D102
        at = _of(slot)
        read_all(self._file, self._host[at], offset)
        self._copy(slot, self.ring[at], self._host[at])

    def close(self) -> None:  # noqa: D102
        self._file.close()

    def _copy(self, slot: int, destination: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._streams[slot]):
            destination.copy_(source, non_blocking=True)
        self._streams[slot].synchronize()


class ByCuFile:
    """By cuFile: directly from registered memory, as the environment sets; or through kvikio's bounce buffers."""

    def __init__(self, directory: Path, mode: Mode) -> None:
        self._file = KvikioFile(directory, mode=mode)
        self._file.grow(2 * RING)
        self._memory = DeviceMemory(torch.device("cuda", torch.cuda.current_device()), RING)
        self.ring = self._memory.tensor
        self._registered = mode != "compat"
        if self._registered:
            register(self.ring)

    def write(self, slot: int, offset: int) -> None:  # noqa: D102
        self._whole(self._file.pwrite(self.ring[slot * CHUNK : (slot + 1) * CHUNK], offset))

    def read(self, slot: int, offset: int) -> None:  # noqa: D102
        self._whole(self._file.pread(self.ring[slot * CHUNK : (slot + 1) * CHUNK], offset))

    def close(self) -> None:
        """Deregister before the memory is freed; otherwise cuFile may wait for it."""
        if self._registered:
            deregister(self.ring)
        self._memory.free()
        self._file.close()

    def _whole(self, count: int) -> None:
        if count != CHUNK or self._file.failures:  # what fails goes through host memory, which is another way
            raise OSError(f"cuFile moved {count} bytes of {CHUNK}, and failed {self._file.failures} times")


def time_moves(mover: Mover, settle: Callable[[], None]) -> dict[str, float]:
    """Bytes per second of writes, of reads, and of both at once, after the data was checked.

    Raises
    ------
    OSError
        If what is read is not what was written.
    """
    every, half = range(SLOTS), SLOTS // 2
    with ThreadPoolExecutor(SLOTS) as pool:

        def run(moves: Iterable[tuple[Callable[[int, int], None], int, int]]) -> float:
            start = time.perf_counter()
            ends = [pool.submit(move, slot, offset) for move, slot, offset in moves]
            for end in ends:
                end.result()
            return len(ends) * CHUNK / (time.perf_counter() - start)

        mover.ring.random_(0, 256)
        settle()
        wanted = mover.ring.clone()
        # All of the file: blocks that were allocated only are slower to write the first time.
        run((mover.write, slot, RING + slot * CHUNK) for slot in every)
        run((mover.write, slot, slot * CHUNK) for slot in every)
        mover.ring.zero_()
        settle()
        run((mover.read, slot, slot * CHUNK) for slot in every)
        if not torch.equal(mover.ring, wanted):
            raise OSError("what was read is not what was written")
        # Writers have half of the slots and of the file, readers the other.
        both = [
            *((mover.write, slot % half, slot * CHUNK) for slot in every),
            *((mover.read, half + slot % half, RING + slot * CHUNK) for slot in every),
        ]
        both = [move for pair in zip(both[:SLOTS], both[SLOTS:], strict=True) for move in pair]
        return {
            "write": _median(lambda: run((mover.write, slot, slot * CHUNK) for slot in every)),
            "read": _median(lambda: run((mover.read, slot, slot * CHUNK) for slot in every)),
            "both": _median(lambda: run(both)),
        }


def main(way: str, directory: Path) -> int:
    """Time it and print; the exit code."""
    try:
        mover: Mover = (
            ThroughHost(directory) if way == "host" else ByCuFile(directory, "compat" if way == "compat" else "gds")
        )
        try:
            result: dict[str, Any] = time_moves(mover, torch.cuda.synchronize)
        finally:
            mover.close()
    except Exception as error:  # whatever it is, this way does not serve
        result = {"error": str(error) or type(error).__name__}
    print(json.dumps(result), flush=True)
    return int("error" in result)


def _of(slot: int) -> slice:
    return slice(slot * CHUNK, (slot + 1) * CHUNK)


def _median(run: Callable[[], float]) -> float:
    return statistics.median(run() for _ in range(_ROUNDS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
