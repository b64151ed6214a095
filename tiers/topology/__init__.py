"""Facts about the machine as plain data; needs no torch and no GPU.

Every reader takes the root of the file system, so that tests can feed it a tree of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from allocator.sizes import PAGE
from tiers.topology.gpu import Gpu, find_gpus, kvikio_version, nvidia_fs_loaded
from tiers.topology.memory import Memory, NumaNode, cores_available, numa_nodes, read_memory
from tiers.topology.storage import Filesystem, filesystem_of

__all__ = [
    "Filesystem",
    "Gpu",
    "Memory",
    "NumaNode",
    "Topology",
    "default_dram_capacity",
    "discover",
    "filesystem_of",
    "gds_obstacle",
    "read_memory",
]


@dataclass(frozen=True, slots=True)
class Topology:
    """What was found.

    Attributes
    ----------
    memory
        Host memory: what the machine, the cgroup and ``ulimit -l`` leave.
    numa
        The nodes of the machine that have memory.
    cores
        Cores that this process may run on.
    gpus
        NVIDIA GPUs.
    kvikio
        Its version, if it is installed.
    nvidia_fs
        Whether the kernel module that GPUDirect Storage needs is loaded.
    """

    memory: Memory
    numa: tuple[NumaNode, ...]
    cores: int
    gpus: tuple[Gpu, ...]
    kvikio: str | None
    nvidia_fs: bool


def discover(root: Path = Path("/")) -> Topology:
    """Read everything once; takes up to a second where nvidia-smi is slow."""
    return Topology(
        memory=read_memory(root),
        numa=numa_nodes(root),
        cores=cores_available(),
        gpus=find_gpus(),
        kvikio=kvikio_version(),
        nvidia_fs=nvidia_fs_loaded(root),
    )


def default_dram_capacity(memory: Memory) -> int:
    """Half of what the cgroup leaves, or of what the machine has available if that is less; whole pages."""
    room = memory.available
    if memory.cgroup is not None:
        room = min(room, memory.cgroup.room)
    return room // 2 // PAGE * PAGE


def gds_obstacle(topology: Topology) -> str | None:
    """Why GPU memory cannot go straight to a drive here, or None where it can."""
    if not topology.gpus:
        return "no NVIDIA GPU"
    if topology.kvikio is None:
        return "kvikio is not installed (extra cuda12 or cuda13)"
    if not topology.nvidia_fs:
        return "the kernel module nvidia-fs is not loaded"
    return None
