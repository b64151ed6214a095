"""The NVMe store beside plain O_DIRECT on the same file, in turn: what striping, bookkeeping and checksums cost.

``python -m benchmarks.disk_store --directory /mnt/nvme0 --size 2GiB --rounds 15``

The plain way is as many threads as the store has requests in flight, in blocks of the store's stripe. All ways move
the same bytes to the same places of one file: two files on one drive differ by more than the ways do. Prints GB/s: the
median of the rounds, and the median ratio of speeds to the plain way with its 95% bootstrap interval.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.alternate import alternate
from torch_tiers.allocator.host.dram import DramArena
from torch_tiers.allocator.nvme.backend import Backend
from torch_tiers.allocator.nvme.posix import PosixFile
from torch_tiers.allocator.nvme.store import DEPTH, STRIPE, NvmeStore
from torch_tiers.allocator.sizes import MiB, format_size, parse_size

GROUP = 64 * MiB  # about what the engine moves at once: up to 192
PLAIN = "plain O_DIRECT"


@dataclass(frozen=True)
class Way:
    write: Callable[[], None]
    read: Callable[[], None]
    close: Callable[[], None]


class SharedFile(PosixFile):
    """A file that several stores use in turn: it has its size from the start, and outlives them."""

    def __init__(self, directory: Path, size: int) -> None:
        super().__init__(directory)
        super().grow(size)

    def grow(self, size: int) -> None:
        pass

    def close(self) -> None:
        pass

    def remove(self) -> None:
        super().close()


def plain(file: Backend, block: torch.Tensor) -> Way:
    pool = ThreadPoolExecutor(DEPTH)

    def each(move: Callable[[torch.Tensor, int], int]) -> None:
        def one(at: int) -> None:
            piece = block[at : at + STRIPE]
            if move(piece, at) != piece.numel():
                raise OSError("short transfer")

        list(pool.map(one, range(0, block.numel(), STRIPE)))

    return Way(partial(each, file.pwrite), partial(each, file.pread), pool.shutdown)


def through_store(file: Backend, block: torch.Tensor, *, checksum: bool) -> Way:
    """The store, in groups as the engine moves them."""
    store = NvmeStore(
        [Path(file.path)],
        block.numel(),
        gds="off",
        checksum=checksum,
        stripe=STRIPE,
        depth=DEPTH,
        step=block.numel(),
        backend=lambda path: file,
    )
    pieces = block.split(GROUP)
    extents = [store.allocate(piece.numel()) for piece in pieces]
    pairs = [(extent, piece) for extent, piece in zip(extents, pieces, strict=True) if extent is not None]

    def write() -> None:
        for future in [store.write(extent, piece) for extent, piece in pairs]:
            future.result()

    def read() -> None:
        for future in [store.read(extent, piece) for extent, piece in pairs]:
            future.result()

    return Way(write, read, store.close)


def measure(directory: Path, size: int, rounds: int) -> None:
    arena = DramArena(size, pinned=False, step=size)
    block = arena.allocate(size)
    if block is None:
        raise SystemExit(f"no {format_size(size)} of memory to move: choose a smaller --size")
    block.tensor.numpy()[:] = np.random.default_rng(0).integers(256, size=size, dtype=np.uint8)
    file = SharedFile(directory, size)
    ways = {
        PLAIN: plain(file, block.tensor),
        "store": through_store(file, block.tensor, checksum=False),
        "store, checksums": through_store(file, block.tensor, checksum=True),
    }
    print(f"{format_size(size)} in requests of {format_size(STRIPE)}, {DEPTH} in flight, {directory.resolve()}")
    for direction in ("write", "read"):
        compared = alternate({name: getattr(way, direction) for name, way in ways.items()}, rounds)
        for name, seconds in compared.medians().items():
            ratio = compared.ratio(PLAIN, name)
            print(
                f"{direction:6}{name:18}{size / seconds / 1e9:6.2f} GB/s"
                f"  of plain: {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
            )
    for way in ways.values():
        way.close()
    file.remove()
    arena.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, action="append", help="may be repeated")
    parser.add_argument("--size", type=parse_size, default=parse_size("1GiB"))
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    for directory in options.directory or [Path()]:
        measure(directory, options.size, options.rounds)


if __name__ == "__main__":
    main()
