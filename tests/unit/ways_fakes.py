"""A machine and a directory on which both direct ways are open, to be spoilt one fact at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch_tiers.allocator.nvme.facts import Gpu, Machine, Place
from torch_tiers.allocator.nvme.ways import Measured, Speeds, Way
from torch_tiers.allocator.sizes import GiB

GB = 1e9
UUID = "c0ffee00-0000-0000-0000-000000000000"
MACHINE = Machine(
    gpu=Gpu(UUID, "NVIDIA H100 80GB HBM3", 128 * GiB),
    kernel="6.8.0-45-generic",
    driver="580.95.05",
    open_modules=True,
    static_bar1=True,
    nvidia_fs=True,
    p2pdma=True,
    multipath=False,
    kvikio="26.10.0",
    cufile=True,
    udev=True,
    wsl=False,
    forced=None,
    p2pdma_off=False,
)
PLACE = Place(Path("/mnt/nvme0"), "ext4", "259:1", ("data=ordered", "rw"), "nvme0n1", None, direct=True)
SLOW, EVEN, FAST = (Speeds(speed * GB, speed * GB, speed * GB) for speed in (9.4, 10, 12))


class Timer:
    """Measures by a table, and notes what it was asked for."""

    def __init__(self, told: Mapping[Way, Measured]) -> None:
        self.told = told
        self.asked: list[tuple[Path, tuple[Way, ...]]] = []

    def __call__(
        self, ways: Sequence[Way], machine: Machine, place: Place, cache: Path | None
    ) -> Mapping[Way, Measured]:
        self.asked.append((place.path, tuple(ways)))
        return {way: self.told[way] for way in ways}
