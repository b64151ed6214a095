"""Cores on anonymous files, for tests of the allocator that need no GPU."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import numpy as np

from torch_tiers.allocator.native import Core
from torch_tiers.allocator.native.sequence_layout import ELSEWHERE, SequenceLayout
from torch_tiers.allocator.sizes import MiB

PAGE = 2 * MiB
HBM, DRAM = 0, 1
FREE, USED = 1, 2


@contextlib.contextmanager
def opened(hbm: int, dram: int) -> Iterator[Core]:
    made = Core("memfd", hbm, dram)
    yield made
    for block in made.blocks():
        if block["kind"] == USED:
            made.free(int(block["address"]))
    made.close()


def fill(address: int, nbytes: int, value: int) -> None:
    ctypes.memset(address, value, nbytes)


def holds(address: int, nbytes: int, value: int) -> bool:
    return ctypes.string_at(address, nbytes) == bytes([value]) * nbytes


def sequence_layout(sizes: list[int], offsets: list[int], costs: list[int] | None = None) -> SequenceLayout:
    ends = [size + offset for size, offset in zip(sizes, offsets, strict=True) if offset != ELSEWHERE]
    pages = np.array(costs or [1] * -(-max(ends) // PAGE))
    return SequenceLayout(0, np.array(sizes), np.array(offsets, np.uint64), pages)


def set_layout(core: Core, sizes: list[int], offsets: list[int], costs: list[int] | None = None) -> None:
    core.set_layout(sequence_layout(sizes, offsets, costs))
