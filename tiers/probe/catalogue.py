"""Every path of a machine: each GPU with each NUMA node, NVMe with each of them, and memory with itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path as Folder

from torch_tiers.allocator.nvme.backend import Backend
from torch_tiers.allocator.nvme.kvikio import KvikioFile, kvikio_refusal
from torch_tiers.allocator.nvme.posix import PosixFile
from torch_tiers.allocator.nvme.store import NvmeStore
from torch_tiers.allocator.nvme.ways import Gds
from torch_tiers.migrator.model.links import LANES
from torch_tiers.probe.affinity import Node
from torch_tiers.probe.buffers import BouncedBuffer, Buffer, DramBuffer, HbmBuffer
from torch_tiers.probe.disk import STEP, DiskPath, Way
from torch_tiers.probe.gds import gds_obstacle
from torch_tiers.probe.gpu import Direction, HbmDramPath, cuda_refusal
from torch_tiers.probe.host import HostMemory, MemcpyPath
from torch_tiers.probe.measure import ProbePath
from torch_tiers.probe.results import Path

_DIRECTIONS: dict[str, tuple[Direction, ...]] = {"d2h": ("d2h",), "h2d": ("h2d",), "both": ("d2h", "h2d")}
_WAYS: tuple[Way, ...] = ("write", "read")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as torch numbers them, and the NUMA node that it is attached to."""

    index: int
    node: Node


@dataclass(frozen=True, slots=True)
class Disks:
    """The store to measure.

    Attributes
    ----------
    directories
        Where it lies.
    checksum
        Whether it checks what comes back.
    gds
        Whether a run wants GPUDirect Storage.
    ring
        Bytes on disk that a sustained run goes round.
    """

    directories: tuple[Folder, ...]
    checksum: bool
    gds: Gds = "prefer"
    ring: int = 0

    def open(self, backend: Callable[[Folder], Backend], checksum: bool, capacity: int) -> NvmeStore:
        """Open it with a backend of its own."""
        return NvmeStore(self.directories, capacity, gds="off", checksum=checksum, step=STEP, backend=backend)


def catalogue(gpus: Sequence[Gpu], nodes: Sequence[Node], memory: HostMemory, disks: Disks) -> list[ProbePath]:
    """List every path, also those that cannot run; without a GPU, those of one that is not there.

    Parameters
    ----------
    nodes
        At least one.
    """
    gpus = gpus or (Gpu(0, nodes[0]),)
    return [
        *_memcpy(nodes, memory),
        *(path for gpu in gpus for path in _links(gpu, nodes, memory)),
        *_dram_disk(nodes[0], memory, disks),
        *(path for gpu in gpus for path in _hbm_disk(gpu, memory, disks)),
    ]


def selected(paths: Sequence[ProbePath], patterns: Sequence[str]) -> list[ProbePath]:
    """Those whose kind one of `patterns` names, ``*`` standing for anything."""
    return [probe for probe in paths if any(fnmatch(probe.path.kind, pattern) for pattern in patterns)]


def _memcpy(nodes: Sequence[Node], memory: HostMemory) -> Iterator[ProbePath]:
    for source in nodes:
        for destination in nodes:
            yield MemcpyPath("memcpy", memory, source, destination, 1)
            yield MemcpyPath("memcpy.all_cores", memory, source, destination, max(len(source.cores), 1))


def _links(gpu: Gpu, nodes: Sequence[Node], memory: HostMemory) -> Iterator[ProbePath]:
    for node in nodes:
        for kind, directions in _DIRECTIONS.items():
            yield HbmDramPath(kind, gpu.index, node, directions, memory, gpu.node.cores)
    # torch puts what it pins where it likes, so the reference is taken once.
    for kind, directions in _DIRECTIONS.items():
        yield HbmDramPath(f"{kind}.torch", gpu.index, gpu.node, directions, None, gpu.node.cores)


def _dram_disk(node: Node, memory: HostMemory, disks: Disks) -> Iterator[ProbePath]:
    for way in _WAYS:
        lane = f"disk_{way}"
        path = _path(way, lane, f"dram{node.number}", lane)
        yield DiskPath(
            path,
            way,
            DramBuffer(memory, node),
            disks.directories,
            partial(disks.open, PosixFile, disks.checksum),
            node.cores,
            ring=disks.ring,
        )


def _hbm_disk(gpu: Gpu, memory: HostMemory, disks: Disks) -> Iterator[ProbePath]:
    # kvikio's own way is measured as it comes: without checksums.
    ways_in: tuple[tuple[str, Callable[[], Buffer], partial[NvmeStore], Callable[[], str | None]], ...] = (
        (
            "gds_{}",
            partial(HbmBuffer, gpu.index),
            partial(disks.open, partial(KvikioFile, mode="gds"), disks.checksum),
            partial(gds_obstacle, disks.directories, disks.gds),
        ),
        (
            "hbm_{}.bounce",
            lambda: BouncedBuffer(gpu.index, DramBuffer(memory, gpu.node)),
            partial(disks.open, PosixFile, disks.checksum),
            cuda_refusal,
        ),
        (
            "hbm_{}.compat",
            partial(HbmBuffer, gpu.index),
            partial(disks.open, partial(KvikioFile, mode="compat"), False),
            kvikio_refusal,
        ),
    )
    for name, buffer, open_store, refusal in ways_in:
        for way in _WAYS:
            kind = name.format(way)
            yield DiskPath(
                _path(way, kind, f"hbm{gpu.index}", kind if kind in LANES else None),
                way,
                buffer(),
                disks.directories,
                open_store,
                gpu.node.cores,
                ring=disks.ring,
                refusal=refusal,
            )


def _path(way: Way, kind: str, near: str, lane: str | None) -> Path:
    return Path(kind, near, "nvme", lane) if way == "write" else Path(kind, "nvme", near, lane)
