"""Several files that are used as one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_tiers.allocator.nvme.backend import BLOCK, read_all, write_all
from torch_tiers.allocator.nvme.files import Files, several
from torch_tiers.allocator.nvme.posix import PosixFile
from torch_tiers.allocator.nvme.store import NvmeStore
from torch_tiers.allocator.sizes import KiB, MiB

UNIT = 4 * BLOCK


class Memory:
    """A file in memory; what was never grown to cannot be written."""

    path = "/memory"
    device_memory = False

    def __init__(self) -> None:
        self.data = torch.zeros(0, dtype=torch.uint8)
        self.closed = False

    def grow(self, size: int) -> None:
        assert size > self.data.numel()
        self.data = torch.cat([self.data, torch.zeros(size - self.data.numel(), dtype=torch.uint8)])

    def pread(self, block: torch.Tensor, offset: int) -> int:
        block.copy_(self.data[offset : offset + block.numel()])
        return block.numel()

    def pwrite(self, block: torch.Tensor, offset: int) -> int:
        self.data[offset : offset + block.numel()] = block
        return block.numel()

    def close(self) -> None:
        self.closed = True


@given(
    st.integers(1, 5),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 39), st.integers(1, 20)), max_size=8),
)
def test_they_hold_what_one_file_would(count: int, steps: list[int], writes: list[tuple[int, int]]) -> None:
    files = [Memory() for _ in range(count)]
    several_files, one, size = Files(files, UNIT), Memory(), 0
    for step in steps:
        size += step * BLOCK
        several_files.grow(size)
        one.grow(size)
        assert sum(file.data.numel() for file in files) == size
        for number, (start, blocks) in enumerate(writes):
            offset = start * BLOCK % size
            block = torch.full((min(blocks * BLOCK, size - offset),), number + 1, dtype=torch.uint8)
            write_all(several_files, block, offset)
            write_all(one, block, offset)
    found = torch.empty(size, dtype=torch.uint8)
    read_all(several_files, found, 0)
    assert torch.equal(found, one.data)
    several_files.close()
    assert all(file.closed for file in files)


def test_a_store_of_several_files_gives_back_what_it_was_given(tmp_path: Path) -> None:
    store = NvmeStore([tmp_path], 8 * MiB, gds="off", step=MiB, stripe=64 * KiB, backend=several(PosixFile, 3))
    block = torch.empty(3 * MiB + BLOCK, dtype=torch.uint8)[-(3 * MiB) :]
    block = block[-block.data_ptr() % BLOCK :][: 2 * MiB].random_(0, 256)
    content, extents = block.clone(), [store.allocate(2 * MiB) for _ in range(3)]
    for extent in extents:
        assert extent is not None
        store.write(extent, block).result()
    block.zero_()
    assert extents[1] is not None
    store.read(extents[1], block).result()
    assert torch.equal(block, content)
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_where_one_cannot_be_made_the_others_are_closed(tmp_path: Path) -> None:
    made: list[Memory] = []

    def open_file(directory: Path) -> Memory:
        if len(made) == 2:
            raise OSError("no more")
        made.append(Memory())
        return made[-1]

    with pytest.raises(OSError, match="no more"):
        several(open_file)(tmp_path)
    assert all(file.closed for file in made)
