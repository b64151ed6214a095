"""The NVMe store beside plain O_DIRECT on the same file system, in turn: what striping, bookkeeping and checksums cost.

``python -m benchmarks.disk_store --directory /mnt/nvme0 --size 2GiB --rounds 7``

The plain way is one preallocated file, moved by as many threads as the store has requests in flight, in blocks
of the store's stripe. Prints GB/s: the median of the rounds, and the median ratio to the plain way with its 95%
bootstrap interval.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from allocator.dram import DramArena, DramBlock
from allocator.nvme.store import NvmeStore
from allocator.sizes import MiB, format_size, parse_size
from benchmarks.alternate import median_ratio

STRIPE = 4 * MiB
DEPTH = 8
GROUP = 64 * MiB  # what the engine moves at once


def plain(directory: Path, block: DramBlock) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
    """Write, read and close: threads over one O_DIRECT file."""
    handle, name = tempfile.mkstemp(dir=directory)
    os.close(handle)
    flags = os.O_RDWR | getattr(os, "O_DIRECT", 0)
    try:
        file = os.open(name, flags)
    except OSError:  # tmpfs
        file = os.open(name, os.O_RDWR)
    os.unlink(name)
    os.posix_fallocate(file, 0, block.nbytes)
    memory = memoryview(block.tensor.numpy())
    pool = ThreadPoolExecutor(DEPTH)

    def each(move: Callable[[int, memoryview, int], int]) -> None:
        def one(at: int) -> None:
            piece = memory[at : at + STRIPE]
            if move(file, piece, at) != len(piece):
                raise OSError("short transfer")

        list(pool.map(one, range(0, block.nbytes, STRIPE)))

    def close() -> None:
        pool.shutdown()
        os.close(file)

    return (
        lambda: each(lambda fd, piece, at: os.pwrite(fd, piece, at)),
        lambda: each(lambda fd, piece, at: os.preadv(fd, [piece], at)),
        close,
    )


def through_store(
    directory: Path, block: DramBlock, *, checksum: bool
) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
    """Write, read and close: the store, in groups as the engine moves them."""
    store = NvmeStore(
        [directory], block.nbytes, gds="off", checksum=checksum, stripe=STRIPE, depth=DEPTH, step=block.nbytes
    )
    pieces = [block.tensor[at : at + GROUP] for at in range(0, block.nbytes, GROUP)]
    extents = [store.allocate(piece.numel()) for piece in pieces]

    def write() -> None:
        for future in [store.write(e, p) for e, p in zip(extents, pieces, strict=True) if e is not None]:
            future.result()

    def read() -> None:
        for future in [store.read(e, p) for e, p in zip(extents, pieces, strict=True) if e is not None]:
            future.result()

    return write, read, store.close


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path())
    parser.add_argument("--size", type=parse_size, default=parse_size("1GiB"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    arena = DramArena(options.size, pinned=False)
    block = arena.allocate(options.size)
    if block is None:
        raise SystemExit(f"no {format_size(options.size)} of memory to move: choose a smaller --size")
    block.tensor.numpy()[:] = np.random.default_rng(0).integers(256, size=options.size, dtype=np.uint8)
    ways = {
        "plain O_DIRECT": plain(options.directory, block),
        "store": through_store(options.directory, block, checksum=False),
        "store, checksums": through_store(options.directory, block, checksum=True),
    }
    seconds: dict[str, dict[str, list[float]]] = {"write": {}, "read": {}}
    names = list(ways)
    for number in range(-1, options.rounds):  # the first round claims the blocks and is not counted
        for name in names[number % 3 :] + names[: number % 3]:
            for index, direction in enumerate(seconds):
                start = time.perf_counter()
                ways[name][index]()
                if number >= 0:
                    seconds[direction].setdefault(name, []).append(time.perf_counter() - start)
    for _, _, close in ways.values():
        close()
    where = options.directory.resolve()
    print(f"{format_size(options.size)} in requests of {format_size(STRIPE)}, {DEPTH} in flight, {where}")
    for direction, by_name in seconds.items():
        for name, times in by_name.items():
            ratio = median_ratio(by_name["plain O_DIRECT"], times)
            print(
                f"{direction:6}{name:18}{options.size / float(np.median(times)) / 1e9:6.2f} GB/s"
                f"  of plain: {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
            )


if __name__ == "__main__":
    main()
