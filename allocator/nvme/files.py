"""Several files used as one, as file systems let only one writer at a time into each file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from torch_tiers.allocator.nvme.backend import Backend
from torch_tiers.allocator.sizes import MiB

FILES, UNIT = 4, 8 * MiB
"""A tmpfs, and ext4 where blocks are new, has the writers of a file wait for one another: with one file an H200's
/dev/shm took 3.3 GB/s of twelve threads, with four 12. A unit is what a store asks for at a time."""


class Files:
    """A `Backend` of files in one directory, taken in turn, `unit` by `unit`. See there for each method's contract."""

    def __init__(self, files: Sequence[Backend], unit: int = UNIT) -> None:
        self._files = tuple(files)
        self._unit = unit
        self._size = 0
        self.path = self._files[0].path
        self.device_memory = all(file.device_memory for file in self._files)

    @property
    def bounced(self) -> int:  # noqa: D102
        return sum(file.bounced for file in self._files)

    def grow(self, size: int) -> None:  # noqa: D102
        for number, file in enumerate(self._files):
            part = self._part(number, size)
            if part > self._part(number, self._size):
                file.grow(part)
        self._size = size

    def pread(self, block: torch.Tensor, offset: int) -> int:  # noqa: D102
        file, start, most = self._find(offset)
        return file.pread(block[:most], start)

    def pwrite(self, block: torch.Tensor, offset: int) -> int:  # noqa: D102
        file, start, most = self._find(offset)
        return file.pwrite(block[:most], start)

    def close(self) -> None:  # noqa: D102
        for file in self._files:
            file.close()

    def _find(self, offset: int) -> tuple[Backend, int, int]:
        """The file that a byte lies in, its offset there, and how many bytes follow it there."""
        unit, within = divmod(offset, self._unit)
        turn, number = divmod(unit, len(self._files))
        return self._files[number], turn * self._unit + within, self._unit - within

    def _part(self, number: int, size: int) -> int:
        """How long a file is if all of them together hold `size` bytes."""
        units, rest = divmod(size, self._unit)
        turns, more = divmod(units, len(self._files))
        return turns * self._unit + (self._unit if number < more else rest if number == more else 0)


def several(open_file: Callable[[Path], Backend], count: int = FILES) -> Callable[[Path], Backend]:
    """A function that opens `count` files in a directory as one."""

    def open_all(directory: Path) -> Backend:
        files: list[Backend] = []
        try:
            while len(files) < count:
                files.append(open_file(directory))
        except BaseException:
            for file in files:
                file.close()
            raise
        return Files(files)

    return open_all
