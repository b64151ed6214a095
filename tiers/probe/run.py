"""One probe from beginning to end."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path as Folder

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.nvme.ways import Gds
from torch_tiers.allocator.sizes import GiB
from torch_tiers.migrator.model.links import LANES
from torch_tiers.probe.affinity import nodes
from torch_tiers.probe.catalogue import Disks, catalogue, selected
from torch_tiers.probe.contention import under_load, workers_that_fit
from torch_tiers.probe.disk import DiskPath
from torch_tiers.probe.host import HostMemory
from torch_tiers.probe.links import LEAST
from torch_tiers.probe.machine import find_gpus, look
from torch_tiers.probe.measure import SUSTAINED_SIZE, Effort, ProbePath, measure, window
from torch_tiers.probe.results import Report
from torch_tiers.topology import read_memory

LOADED_SIZE = 4 * LEAST
_RING = 16 * GiB  # more than the caches of drives hold


@dataclass(frozen=True, slots=True)
class Options:
    """What to probe, and how.

    Attributes
    ----------
    patterns
        Kinds of paths, ``*`` standing for anything.
    effort
        Of each path.
    seconds
        For all paths together, about; contention takes half as much again.
    directories, checksum, gds
        Of the store.
    sustained
        Keep drives busy past their caches; they get one size, and all of their time for it.
    contention
        Measure every link under load as well.
    """

    patterns: tuple[str, ...] = ("*",)
    effort: Effort = field(default_factory=Effort)
    seconds: float = 40.0
    directories: tuple[Folder, ...] = ()
    checksum: bool = True
    gds: Gds = "prefer"
    sustained: bool = False
    contention: bool = False


Begin = Callable[[int], Callable[[str], None]]
"""Told how many paths there are; what it returns is told the label of each before it is measured."""


def probe(options: Options, begin: Begin = lambda total: lambda label: None) -> Report:
    """Measure everything that `options` name; what was made for that is gone afterwards, also after an error.

    Raises
    ------
    TiersError
        If no path is of a kind that was asked for.
    """
    started, start = datetime.now(UTC), time.perf_counter()
    machine_nodes = nodes()
    gpus = find_gpus(machine_nodes)
    memory = HostMemory(_host_bytes(options.effort, len(machine_nodes)), pinned=bool(gpus))
    ring = _ring(options) if options.sustained else 0
    disks = Disks(options.directories, options.checksum, options.gds, ring)
    try:
        paths = _chosen(catalogue(gpus, machine_nodes, memory, disks), options.patterns)
        on_path = begin(len(paths) * (1 + options.contention))

        def effort_for(path: ProbePath) -> Effort:
            if options.sustained and isinstance(path, DiskPath):
                return Effort((SUSTAINED_SIZE,), None, options.effort.verify)
            return options.effort

        memory.grow(machine_nodes)
        results = measure(paths, effort_for, options.seconds, on_path)
        if options.contention:
            results = under_load(paths, results, LOADED_SIZE, workers_that_fit(), options.seconds / 2, on_path)
        machine = look(gpus, machine_nodes, options.directories, options.gds)
    finally:
        memory.close()
    return Report(started.isoformat(timespec="seconds"), time.perf_counter() - start, machine, tuple(results))


def lanes_of(patterns: tuple[str, ...]) -> set[str]:
    """The keys of ``[links]`` that a probe of these kinds may measure: a lane's path is called as the lane is."""
    return {lane for lane in LANES if any(fnmatch(lane, pattern) for pattern in patterns)}


def _chosen(paths: list[ProbePath], patterns: tuple[str, ...]) -> list[ProbePath]:
    kinds = list(dict.fromkeys(path.path.kind for path in paths))
    for pattern in patterns:
        if not selected(paths, (pattern,)):
            near = get_close_matches(pattern, kinds, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(kinds)}"
            raise TiersError(f"no path is called {pattern!r}{hint}")
    return selected(paths, patterns)


def _host_bytes(effort: Effort, node_count: int) -> int:
    """Room for two windows of every size, as far as a quarter of what is available goes."""
    wanted = 2 * max(window(size) for size in (*effort.sizes, SUSTAINED_SIZE))
    return min(wanted, read_memory().available // 4 // node_count)


def _ring(options: Options) -> int:
    """As much as `_RING`, if that is at most half of what is free in the fullest directory times their number."""
    free = min((shutil.disk_usage(path).free for path in options.directories), default=0)
    return min(_RING, free // 2 * len(options.directories))
