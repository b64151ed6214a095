"""What a probe found, as plain data. Sizes in bytes, times in seconds, bandwidths in bytes per second."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

Status = Literal["measured", "waived", "failed"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Path:
    """One way for bytes to go.

    Attributes
    ----------
    kind
        What is measured, as ``--paths`` selects it: ``d2h``, ``disk_read``, ``gds_write``.
    source, destination
        The tier and its number: ``hbm0`` is a GPU, ``dram1`` a NUMA node, ``nvme`` all directories together.
    lane
        The key of ``[links]`` that this path is the measure of, if it is one.
    """

    kind: str
    source: str
    destination: str
    lane: str | None = None

    @property
    def label(self) -> str:
        """The path in one phrase."""
        return f"{self.kind} {self.source}>{self.destination}"


@dataclass(frozen=True, slots=True)
class Sample:
    """One size on one path.

    Attributes
    ----------
    size
        Bytes of one copy.
    nbytes
        Bytes of one run, which is several small copies queued together, or both directions.
    seconds
        Every run.
    """

    size: int
    nbytes: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds of the run in the middle."""
        return median(self.seconds)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the run in the middle."""
        return self.nbytes / self.median


@dataclass(frozen=True, slots=True)
class LoadedSample:
    """A path while processes copy in host memory.

    Attributes
    ----------
    workers
        Processes that copied.
    host_traffic
        What they read plus what they wrote, in bytes per second.
    bandwidth
        What was left for the path.
    """

    workers: int
    host_traffic: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class PathResult:
    """What became of one path.

    Attributes
    ----------
    status
        ``waived``: it cannot run here. ``failed``: it ran, and an error or wrong data came of it.
    reason
        Why it is not measured, or not at every size; empty if it is.
    """

    path: Path
    status: Status
    reason: str = ""
    samples: tuple[Sample, ...] = ()
    loaded: tuple[LoadedSample, ...] = ()

    def peak(self, least: int = 0) -> float | None:
        """The best bandwidth of the sizes from `least` on, or None if there is none."""
        return max((sample.bandwidth for sample in self.samples if sample.size >= least), default=None)


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """A GPU as torch numbers them; None is what nvidia-smi does not tell. It was busy when asked."""

    index: int
    name: str
    numa_node: int | None
    pcie_generation: int | None
    pcie_generation_max: int | None
    pcie_width: int | None
    sm_clock_mhz: int | None
    sm_clock_max_mhz: int | None


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory of the store and what it lies on: ``ext4 on nvme0n1 (solid state)``."""

    path: str
    filesystem: str


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured with, and on what.

    Attributes
    ----------
    versions
        Of tiers, python, torch, cuda, driver and kvikio; None is what is not there.
    numa
        Cores that this process may use, by NUMA node.
    gds_obstacle
        Why GPUDirect Storage is not in use, or None where it is.
    """

    versions: dict[str, str | None]
    numa: dict[str, int]
    gpus: tuple[GpuFacts, ...]
    directories: tuple[Directory, ...]
    gds_obstacle: str | None


@dataclass(frozen=True, slots=True)
class Report:
    """One probe: when it started (ISO 8601), how long it took, where, and what it found."""

    started: str
    seconds: float
    machine: Machine
    results: tuple[PathResult, ...]


def to_json(report: Report) -> dict[str, Any]:
    """The report as ``schema.json`` describes it: all of the data, and the bandwidths that follow from it."""
    return {
        "version": SCHEMA_VERSION,
        "started": report.started,
        "seconds": report.seconds,
        "machine": asdict(report.machine),
        "results": [_result(result) for result in report.results],
    }


def _result(result: PathResult) -> dict[str, Any]:
    samples = [{**asdict(sample), "bandwidth": sample.bandwidth} for sample in result.samples]
    return {**asdict(result), "samples": samples}
