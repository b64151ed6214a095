"""Paths and reports that no hardware stands behind."""

from __future__ import annotations

import os

from torch_tiers.allocator.sizes import MiB
from torch_tiers.probe.measure import Run, window
from torch_tiers.probe.results import (
    Directory,
    GpuFacts,
    LoadedSample,
    Machine,
    Path,
    PathResult,
    Report,
    Sample,
)

GB = 10**9


class FakePath:
    """A path of a known speed that keeps a diary. `wrong` is a size whose data is lost, `error` what a size raises."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        speed: float = GB,
        refusal: str | None = None,
        wrong: int | None = None,
        errors: dict[int, Exception] | None = None,
    ) -> None:
        self.path = path or Path("fake", "dram0", "dram0")
        self.cores = frozenset(os.sched_getaffinity(0))
        self.diary: list[str] = []
        self._speed = speed
        self._refusal = refusal
        self._wrong = wrong
        self._errors = errors or {}
        self._size = 0

    def why_not(self) -> str | None:
        return self._refusal

    def prepare(self, size: int) -> None:
        self.diary.append("prepare")
        self._size = size
        if size in self._errors:
            raise self._errors[size]

    def run(self, size: int) -> Run:
        self.diary.append("run")
        return Run(window(size), window(size) / self._speed)

    def intact(self) -> bool:
        self.diary.append("intact")
        return self._size != self._wrong

    def release(self) -> None:
        self.diary.append("release")


def sample(size: int, bandwidth: float) -> Sample:
    return Sample(size, size, (size / bandwidth,))


def result(lane: str, bandwidths: dict[int, float], *, gpu: int = 0, node: int = 0) -> PathResult:
    """A measured lane of `gpu` or, for disk lanes, of the store."""
    ends = {
        "d2h": (f"hbm{gpu}", f"dram{node}"),
        "h2d": (f"dram{node}", f"hbm{gpu}"),
        "disk_write": (f"dram{node}", "nvme"),
        "disk_read": ("nvme", f"dram{node}"),
    }[lane]
    samples = tuple(sample(size, bandwidth) for size, bandwidth in bandwidths.items())
    return PathResult(Path(lane, *ends, lane), "measured", samples=samples)


def report(*results: PathResult) -> Report:
    machine = Machine(
        versions={"tiers": "0.1.0", "python": "3.12", "torch": "2.11", "cuda": "13.0", "driver": "580", "kvikio": None},
        numa={"0": 16},
        gpus=(GpuFacts(0, "H100", None, 5, 5, 16, 1980, 1980),),
        directories=(Directory("/mnt/nvme0", "ext4 on nvme0n1 (solid state)"),),
        gds_obstacle="kvikio is not installed",
    )
    return Report("2026-01-01T00:00:00+00:00", 30.0, machine, results)


def full_report() -> Report:
    """Every link, one path under load, one waived and one failed."""
    d2h = result("d2h", {MiB: 40 * GB, 16 * MiB: 55 * GB})
    loaded = (LoadedSample(0, 0.0, 55.0 * GB), LoadedSample(8, 98.0 * GB, 45.0 * GB))
    return report(
        PathResult(d2h.path, "measured", "stopped before 1.0 GiB: no time", d2h.samples, loaded),
        result("h2d", {16 * MiB: 54 * GB}),
        result("disk_write", {16 * MiB: 3 * GB}),
        result("disk_read", {16 * MiB: 2.5 * GB}),
        PathResult(Path("gds_write", "hbm0", "nvme", "gds_write"), "waived", "no nvidia-fs"),
        PathResult(Path("hbm_write.compat", "hbm0", "nvme"), "failed", "the drive is gone"),
    )
