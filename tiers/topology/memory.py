"""Host memory: how much there is, and how much of it this process may take."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Version 1 of cgroups writes "no limit" as the largest multiple of the page size below 2**63.
_UNLIMITED = 2**60

# What of memory.stat the kernel gives up before it ends a process, and what of that must be written to disk first.
# Active pages count as well, as they do in MemAvailable: a data file that is read twice is active for good, and would
# starve dram. Given up they cost the program another read of the disk; the part that is kept of every limit cushions
# what is wrong with this.
_CACHE = ("inactive_file", "active_file"), ("file_dirty", "file_writeback")
_CACHE_V1 = ("total_inactive_file", "total_active_file"), ("total_dirty", "total_writeback")


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """The level of the cgroup hierarchy that leaves the least room; limits hold at every level at once.

    Attributes
    ----------
    path
        The cgroup's directory.
    limit, usage
        Bytes. Usage is without the file cache that the kernel can drop at once.
    """

    path: Path
    limit: int
    usage: int

    @property
    def room(self) -> int:
        """Bytes left under the limit."""
        return max(self.limit - self.usage, 0)


@dataclass(frozen=True, slots=True)
class Memory:
    """Host memory in bytes; None means no limit.

    Attributes
    ----------
    total, available
        MemTotal and MemAvailable.
    cgroup
        The binding cgroup limit.
    memlock
        ``ulimit -l``: bytes that this process may lock.
    """

    total: int
    available: int
    cgroup: CgroupMemory | None
    memlock: int | None

    @property
    def room(self) -> int:
        """What machine and cgroup both leave."""
        return self.available if self.cgroup is None else min(self.available, self.cgroup.room)


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node: its number, bytes of memory and cores."""

    number: int
    memory: int
    cores: frozenset[int]


def read_memory(root: Path = Path("/")) -> Memory:
    """Read all of the above."""
    meminfo = _meminfo(root / "proc/meminfo")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Memory(
        total=meminfo["MemTotal"],
        available=meminfo["MemAvailable"],
        cgroup=cgroup_memory(root),
        memlock=None if soft == resource.RLIM_INFINITY else soft,
    )


def cgroup_memory(root: Path = Path("/")) -> CgroupMemory | None:
    """Find the limit that binds this process, of either cgroup version; None where no level has one."""
    levels = [level for mount, path in hierarchies(root) for level in _levels(mount, path)]
    return min(levels, key=lambda level: level.room, default=None)


def numa_nodes(root: Path = Path("/")) -> tuple[NumaNode, ...]:
    """List the nodes that have memory, by number."""
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        # Lines read "Node 0 MemTotal: 16384 kB".
        lines = [line.split() for line in (folder / "meminfo").read_text().splitlines()]
        total = next(int(words[3]) * 1024 for words in lines if words[2] == "MemTotal:")
        if total:
            cores = parse_cores((folder / "cpulist").read_text().strip())
            nodes.append(NumaNode(int(folder.name[len("node") :]), total, cores))
    return tuple(sorted(nodes, key=lambda node: node.number))


def parse_cores(text: str) -> frozenset[int]:
    """Read a list of cores as the kernel writes it: ``0-7,16``; empty for a node without any."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first:
            cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def cores_available() -> int:
    """Count the cores that this process may run on, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0))


def cores_of_rank(ranks: int, root: Path = Path("/")) -> float:
    """Cores' worth of time that each of so many ranks may take: its part of the machine or container, or what it sees.

    A container's share may be less than the cores that it shows.
    """
    shares = [share for mount, path in hierarchies(root, "cpu") for share in _cpu_shares(mount, path)]
    return min(cores_available(), min([*shares, os.cpu_count() or 1]) / ranks)


def _cpu_shares(mount: Path, path: str) -> Iterator[float]:
    """What each level allows, from the process's own up to the mount point."""
    here = mount / path.strip("/")
    for folder in (here, *here.parents):
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                yield int(quota) / int(period)
        elif (folder / "cpu.cfs_quota_us").exists() and (
            quota := (folder / "cpu.cfs_quota_us").read_text().strip()
        ) != "-1":
            yield int(quota) / int((folder / "cpu.cfs_period_us").read_text())
        if folder == mount:
            return


def _meminfo(path: Path) -> dict[str, int]:
    pairs = (line.split(":", 1) for line in path.read_text().splitlines())
    return {name: int(rest.split()[0]) * 1024 for name, rest in pairs if rest.split()[-1] == "kB"}


def hierarchies(root: Path, controller: str = "memory") -> Iterator[tuple[Path, str]]:
    """Mount point and path within it of each hierarchy that accounts for memory, or for something else."""
    listing = root / "proc/self/cgroup"
    if not listing.exists():
        return
    for line in listing.read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            # Beside version 1 hierarchies, version 2 is mounted a level down.
            unified = root / "sys/fs/cgroup/unified"
            yield (unified if unified.is_dir() else root / "sys/fs/cgroup"), path
        elif controller in controllers.split(","):
            yield root / "sys/fs/cgroup" / controller, path


def _levels(mount: Path, path: str) -> Iterator[CgroupMemory]:
    """Each level with a limit, from the process's own up to the mount point.

    In a container the listed path may be the host's and not exist below the mount point; the levels that do
    exist are the container's.
    """
    here = mount / path.strip("/")
    for folder in (here, *here.parents):
        for limit, usage, cache in (
            ("memory.max", "memory.current", _CACHE),
            ("memory.high", "memory.current", _CACHE),  # past it, everybody is slowed down to a crawl
            ("memory.limit_in_bytes", "memory.usage_in_bytes", _CACHE_V1),
        ):
            if (folder / limit).exists() and (value := (folder / limit).read_text().strip()) != "max":
                if int(value) >= _UNLIMITED:
                    continue
                used = int((folder / usage).read_text()) - _droppable(folder / "memory.stat", *cache)
                yield CgroupMemory(folder, int(value), max(used, 0))
        if folder == mount:
            return


def _droppable(path: Path, cached: tuple[str, ...], unwritten: tuple[str, ...]) -> int:
    if not path.exists():
        return 0
    stat = {key: int(value) for key, value in map(str.split, path.read_text().splitlines())}
    return max(sum(stat.get(name, 0) for name in cached) - sum(stat.get(name, 0) for name in unwritten), 0)
