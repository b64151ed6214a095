"""Facts about the machine as plain data; needs no torch and no GPU.

Every reader takes the root of the file system, so that tests can feed it a tree of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch_tiers.allocator.nvme.facts import kvikio_version
from torch_tiers.allocator.sizes import PAGE, GiB, format_size
from torch_tiers.topology.gpu import Gpu, find_gpus, numa_node
from torch_tiers.topology.memory import Memory, NumaNode, cores_available, numa_nodes, read_memory
from torch_tiers.topology.storage import Filesystem, filesystem_of

__all__ = [
    "Filesystem",
    "Gpu",
    "Memory",
    "NumaNode",
    "Topology",
    "default_dram_capacity",
    "discover",
    "filesystem_of",
    "memory_left",
    "numa_node",
    "read_memory",
]

_KEPT_PART = (
    4  # one part in so many of a limit stays with the program and its neighbours: disks need seconds to make room
)
_KEPT_AT_MOST = 4 * GiB
_SLACK_PART = 4  # of what is kept, one part in so many may be in use before the arena gives anything back


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
    """

    memory: Memory
    numa: tuple[NumaNode, ...]
    cores: int
    gpus: tuple[Gpu, ...]
    kvikio: str | None


def discover(root: Path = Path("/")) -> Topology:
    """Read everything once; takes up to a second where nvidia-smi is slow."""
    return Topology(
        memory=read_memory(root),
        numa=numa_nodes(root),
        cores=cores_available(),
        gpus=find_gpus(),
        kvikio=kvikio_version(),
    )


def default_dram_capacity(memory: Memory) -> int:
    """Half of what the cgroup leaves, or of what the machine has available if that is less; whole pages."""
    return memory.room // 2 // PAGE * PAGE


def memory_left(memory: Memory) -> tuple[int, str, int]:
    """Bytes that an arena may still take, why no more, for a message, and by how many they may fall below zero.

    A part of every limit is kept for the rest of the program: a cgroup that reaches its limit has a process
    killed. Negative: so much of that part is in use already.
    """
    limits = [(memory.available, memory.total, "the machine", "end what else uses memory")]
    if memory.cgroup is not None:
        who = f"the cgroup {memory.cgroup.path}"
        limits.append((memory.cgroup.room, memory.cgroup.limit, who, "raise that limit"))
    left, kept, limit, who, remedy = min(
        ((left - kept, kept, limit, who, remedy) for left, limit, who, remedy in limits for kept in [_kept(limit)]),
    )
    leaves = f"{who} leaves {format_size(left + kept)} of {format_size(limit)}"
    why = f"{leaves}, of which {format_size(kept)} are kept for the program; {remedy} to have more"
    return left, why, kept // _SLACK_PART


def _kept(limit: int) -> int:
    return min(limit // _KEPT_PART, _KEPT_AT_MOST)
