"""What stands between this machine and a good run: pure functions from facts to findings."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch_tiers.allocator.nvme.decide import Decided, Decision
from torch_tiers.allocator.sizes import format_size
from torch_tiers.config import Config, NvmeConfig
from torch_tiers.monitor.sensors import TRAFFIC, Choice
from torch_tiers.topology import Filesystem, Memory, Topology, default_dram_capacity, filesystem_of
from torch_tiers.topology.wear import Wear, wear

Status = Literal["ok", "degraded", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes
    ----------
    subject
        What was looked at.
    status
        ``degraded``: runs, but slower or smaller than it could. ``missing``: what is configured cannot run.
    found
        The fact.
    advice
        What to do; empty when there is nothing to do.
    """

    subject: str
    status: Status
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """PyTorch as installed: version, the CUDA it was built for, whether it sees a GPU and loads tiers.

    `obstacle` says what keeps our allocator from being put under it, `hooks_obstacle` the C++ part of the hooks from
    being built, and `lanes_obstacle` copies to and from its GPUs from being asked for; None if nothing does.
    """

    version: str
    cuda: str | None
    sees_gpu: bool
    loads_tiers: bool
    obstacle: str | None = None
    hooks_obstacle: str | None = None
    lanes_obstacle: str | None = None


def examine(
    topology: Topology,
    config: Config,
    torch: TorchFacts | None,
    ways: Decision,
    sensors: Choice | None = None,
) -> Iterator[Finding]:
    """Look at everything a run depends on.

    Parameters
    ----------
    topology
        The machine.
    config
        What is asked of it.
    torch
        PyTorch, or None if it cannot be imported.
    ways
        Which way GPU memory goes to each directory, if that need not be direct.
    sensors
        Those that the monitor would use; None if it is switched off.
    """
    yield from _torch(topology, torch)
    if topology.gpus and torch is not None:
        yield _pages(config, torch)
        yield _needed("copies", config, torch.lanes_obstacle, "can be asked of the driver")
    if torch is not None:
        yield _needed("hooks", config, torch.hooks_obstacle, "can be compiled for this torch, once")
    yield from _gpus(topology)
    yield _kvikio(topology)
    yield _gds(topology, config.nvme, ways)
    yield _pinning(topology)
    yield _memory(topology, config)
    yield _cgroup(topology, config)
    yield from _nvme(config.nvme, ways, filesystem_of, lambda path: shutil.disk_usage(path).free, wear)
    yield from _monitor(sensors)


def _torch(topology: Topology, torch: TorchFacts | None) -> Iterator[Finding]:
    if torch is None:
        yield Finding("torch", "missing", "cannot be imported", "install torch >= 2.11")
        return
    found = f"{torch.version}, built for {'CUDA ' + torch.cuda if torch.cuda else 'CPU'}"
    if topology.gpus and not torch.sees_gpu:
        advice = "the driver may be too old for it" if torch.cuda else "install a CUDA build of torch"
        yield Finding("torch", "degraded", f"{found}; it sees no GPU", advice)
    else:
        yield Finding("torch", "ok", found)
    if torch.loads_tiers:
        yield Finding("activation", "ok", "TIERS_ALLOCATOR turns tiers on")
    else:
        yield Finding(
            "activation",
            "missing",
            "PyTorch will not load tiers",
            "install torch-tiers with pip, and unset TORCH_DEVICE_BACKEND_AUTOLOAD",
        )


def _pages(config: Config, torch: TorchFacts) -> Finding:
    if torch.obstacle is None:
        return Finding("allocator pages", "ok", "can be put under this torch")
    if config.allocator != "pages":
        return Finding("allocator pages", "ok", f"not asked for, and not available: {torch.obstacle}")
    return Finding("allocator pages", "degraded", torch.obstacle, "PyTorch's own is used, with the migrator")


def _needed(subject: str, config: Config, obstacle: str | None, can: str) -> Finding:
    """What nothing trains without under tiers."""
    if obstacle is None:
        return Finding(subject, "ok", can)
    status: Status = "degraded" if config.allocator == "off" else "missing"
    return Finding(subject, status, obstacle, "mend that: until then nothing trains with tiers")


def _gpus(topology: Topology) -> Iterator[Finding]:
    if not topology.gpus:
        yield Finding("gpu", "degraded", "none found by nvidia-smi", "host memory stands in for hbm, counted only")
        return
    for gpu in topology.gpus:
        yield Finding("gpu", "ok", f"{gpu.index}: {gpu.name}, {format_size(gpu.memory)}, at {gpu.bus}")
    yield Finding("driver", "ok", topology.gpus[0].driver)


def _kvikio(topology: Topology) -> Finding:
    if topology.kvikio is not None:
        return Finding("kvikio", "ok", topology.kvikio)
    if not topology.gpus:
        return Finding("kvikio", "ok", "not installed; of no use without a GPU")
    return Finding(
        "kvikio", "ok", "not installed; GPU memory goes straight to drives by it: pip install '.[cuda13]' (or cuda12)"
    )


def _gds(topology: Topology, nvme: NvmeConfig, ways: Decision) -> Finding:
    why = ways.obstacle
    if nvme.gds == "off":
        return Finding("GDS", "ok", "switched off by nvme.gds")
    if why is None:
        found = "the machine can; this path has been tested without hardware only"
        return Finding("GDS", "ok", found, "run tiers probe --paths 'gds_*', which verifies the data")
    if nvme.gds == "require":
        mend = why.change or "mend that"
        return Finding("GDS", "missing", f"not in use: {why.reason}", f'set nvme.gds to "prefer", or {mend}')
    if not topology.gpus:
        return Finding("GDS", "ok", "not in use; of no use without a GPU")
    return Finding("GDS", "ok", f"not in use: {why.reason}; NVMe goes through host memory", why.change)


def _pinning(topology: Topology) -> Finding:
    limit = topology.memory.memlock
    if limit is None:
        return Finding("pinning limit", "ok", "none")
    # Measured, without CAP_IPC_LOCK: benchmarks/host_memory_accounting.py. A driver that refuses is told in the run.
    found = f"ulimit -l is {format_size(limit)}, which does not bind what the NVIDIA driver pins"
    return Finding("pinning limit", "ok", found)


def _memory(topology: Topology, config: Config) -> Finding:
    memory = topology.memory
    found = (
        f"{format_size(memory.available)} available of {format_size(memory.total)}, "
        f"{topology.cores} cores, {len(topology.numa) or 1} NUMA node(s)"
    )
    if config.dram.capacity is not None and config.dram.capacity > memory.available:
        asked = f"dram.capacity asks for {format_size(config.dram.capacity)}"
        return Finding("memory", "degraded", f"{found}; {asked}", _lower_dram(memory))
    return Finding("memory", "ok", found)


def _lower_dram(memory: Memory) -> str:
    return f"set dram.capacity to {format_size(default_dram_capacity(memory))} or less"


def _cgroup(topology: Topology, config: Config) -> Finding:
    cgroup = topology.memory.cgroup
    if cgroup is None:
        return Finding("cgroup memory limit", "ok", "none")
    found = f"{format_size(cgroup.room)} left of {format_size(cgroup.limit)} at {cgroup.path}"
    if config.dram.capacity is not None and config.dram.capacity > cgroup.room:
        return Finding(
            "cgroup memory limit",
            "degraded",
            f"{found}, below dram.capacity",
            _lower_dram(topology.memory),
        )
    return Finding("cgroup memory limit", "ok", found)


def _nvme(
    nvme: NvmeConfig,
    ways: Decision,
    filesystem: Callable[[Path], Filesystem],
    free_bytes: Callable[[Path], int],
    worn: Callable[[str], Wear | None],
) -> Iterator[Finding]:
    if not nvme.capacity:
        yield Finding("nvme", "ok", "off; TIERS_NVME and TIERS_NVME_PATH turn it on")
        return
    share = nvme.capacity // len(nvme.paths)
    for path in nvme.paths:
        subject, below, free = f"nvme {path}", filesystem(path), free_bytes(path)
        decided = ways.directories[path]
        direct = "takes O_DIRECT" if decided.place.direct else "goes through the page cache"
        found = f"{below.describe()}, {format_size(free)} free, {direct}; GPU memory goes {decided.describe()}"
        if decided.place.drive is not None and (used := worn(decided.place.drive)) is not None:
            found += f"; {used}"
        if free < share:
            yield Finding(subject, "missing", f"{found}, {format_size(share)} needed", "lower nvme.capacity")
        elif below.in_memory:
            yield Finding(subject, "degraded", found, "what is spilled there stays in memory; name a drive")
        elif below.drive is not None and below.drive.rotational:
            yield Finding(subject, "degraded", found, "a spinning drive is slow; name an NVMe drive")
        else:
            yield _way(subject, found, decided, required=nvme.gds == "require")


def _way(subject: str, found: str, decided: Decided, *, required: bool) -> Finding:
    if required and not decided.choice.direct:
        return Finding(subject, "missing", found, decided.choice.change or 'set nvme.gds to "prefer"')
    return Finding(subject, "ok", found, decided.choice.change)


def _monitor(sensors: Choice | None) -> Iterator[Finding]:
    if sensors is None:
        yield Finding("monitor", "ok", "switched off by monitor.enabled")
        return
    names = ["own copies", *(sensor.name for sensor in sensors.sensors)]
    unknown = "" if TRAFFIC & {*names} else "; who else loads the memory bus none of them tells"
    yield Finding("monitor", "ok", f"watches {', '.join(names)}{unknown}")
    for name, reason in sensors.refused.items():
        # Nothing runs slower for it: our own copies tell what there is to know.
        yield Finding(f"sensor {name}", "ok", f"not in use: {reason}")
