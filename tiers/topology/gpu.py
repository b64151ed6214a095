"""GPUs and what stands between them and the drives, found without torch and without a CUDA context."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from torch_tiers.allocator.sizes import MiB


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: index, name, bytes of memory, PCI bus id and the driver's version."""

    index: int
    name: str
    memory: int
    bus: str
    driver: str


def find_gpus(nvidia_smi: str = "nvidia-smi") -> tuple[Gpu, ...]:
    """List the NVIDIA GPUs; empty where the tool is absent or the driver does not answer."""
    command = [
        nvidia_smi,
        "--query-gpu=index,name,memory.total,pci.bus_id,driver_version",
        "--format=csv,noheader,nounits",
    ]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(_gpu(line) for line in answer.stdout.splitlines() if line.strip())


def numa_node(bus: str | None, root: Path = Path("/")) -> int | None:
    """Find the NUMA node of a PCI device such as ``00000000:1B:00.0``; None where nobody says."""
    if bus is None:
        return None
    domain, _, rest = bus.lower().partition(":")
    file = root / "sys/bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node"
    number = int(file.read_text()) if file.exists() else -1
    return number if number >= 0 else None


def _gpu(line: str) -> Gpu:
    index, name, mebibytes, bus, driver = (field.strip() for field in line.split(","))
    return Gpu(int(index), name, int(mebibytes) * MiB, bus, driver)
