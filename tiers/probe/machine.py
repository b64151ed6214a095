"""What is measured on: versions, GPUs and their links, NUMA nodes, drives."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from torch_tiers.allocator.nvme.facts import kvikio_version
from torch_tiers.allocator.nvme.ways import Gds
from torch_tiers.probe.affinity import Node
from torch_tiers.probe.catalogue import Gpu
from torch_tiers.probe.gds import gds_obstacle
from torch_tiers.probe.results import Directory, GpuFacts, Machine
from torch_tiers.topology import filesystem_of
from torch_tiers.topology.gpu import numa_node

_BUSY = 1_000_000_000  # cycles: half a second or more, in which nvidia-smi answers
_QUERY = {
    "driver": "driver_version",
    "bus": "pci.bus_id",
    "generation": "pcie.link.gen.current",
    "generation_max": "pcie.link.gen.max",
    "width": "pcie.link.width.current",
    "clock": "clocks.current.sm",
    "clock_max": "clocks.max.sm",
}


def find_gpus(nodes: Sequence[Node], root: Path = Path("/")) -> tuple[Gpu, ...]:
    """List the GPUs that torch sees, each with the node it is attached to (the first where that is unknown)."""
    if not torch.cuda.is_available():
        return ()
    by_number = {node.number: node for node in nodes if node.cores}
    found = []
    for index in range(torch.cuda.device_count()):
        number = numa_node(ask(index).get("bus"), root)
        found.append(Gpu(index, nodes[0] if number is None else by_number.get(number, nodes[0])))
    return tuple(found)


def look(gpus: Sequence[Gpu], nodes: Sequence[Node], directories: tuple[Path, ...], gds: Gds) -> Machine:
    """Describe the machine, each GPU while it is busy: an idle one lowers its clock and its PCIe link."""
    answers = {}
    for gpu in gpus:
        with torch.cuda.device(gpu.index):
            torch.cuda._sleep(_BUSY)
            answers[gpu.index] = ask(gpu.index)
            torch.cuda.synchronize()
    return Machine(
        versions={
            "tiers": _tiers_version(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "driver": next(iter(answers.values()), {}).get("driver"),
            "kvikio": kvikio_version(),
        },
        numa={str(node.number): len(node.cores) for node in nodes},
        gpus=tuple(_facts(index, answer) for index, answer in answers.items()),
        directories=tuple(Directory(str(path), filesystem_of(path).describe()) for path in directories),
        gds_obstacle=gds_obstacle(directories, gds),
    )


def ask(index: int, nvidia_smi: str = "nvidia-smi") -> dict[str, str]:
    """Ask nvidia-smi about the GPU that torch numbers `index`; empty where it does not answer."""
    # By its name of its own: torch and nvidia-smi number GPUs differently under CUDA_VISIBLE_DEVICES.
    name = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    command = [nvidia_smi, f"--id={name}", f"--query-gpu={','.join(_QUERY.values())}"]
    try:
        answer = subprocess.run(
            [*command, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_answer(answer.stdout)


def parse_answer(text: str) -> dict[str, str]:
    """Read one line of nvidia-smi by the keys of the query."""
    values = [value.strip() for value in text.splitlines()[0].split(",")] if text.strip() else []
    return dict(zip(_QUERY, values, strict=True)) if len(values) == len(_QUERY) else {}


def _facts(index: int, answer: dict[str, str]) -> GpuFacts:
    def number(key: str) -> int | None:
        text = answer.get(key, "")
        return int(text) if text.isdecimal() else None  # "[N/A]" in some virtual machines

    return GpuFacts(
        index=index,
        name=torch.cuda.get_device_properties(index).name,
        numa_node=numa_node(answer.get("bus")),
        pcie_generation=number("generation"),
        pcie_generation_max=number("generation_max"),
        pcie_width=number("width"),
        sm_clock_mhz=number("clock"),
        sm_clock_max_mhz=number("clock_max"),
    )


def _tiers_version() -> str | None:
    try:
        return version("torch-tiers")
    except PackageNotFoundError:  # run from a checkout
        return None
