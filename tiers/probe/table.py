"""A report for people: what it was measured on, a picture of the links, a table, and what could not run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from torch_tiers.allocator.sizes import GiB, KiB, MiB
from torch_tiers.config import LinksConfig
from torch_tiers.probe.links import measured_links
from torch_tiers.probe.results import Machine, PathResult, Report


def render(report: Report) -> Iterator[RenderableType]:
    """Tables and lines."""
    yield from header(report.machine)
    yield ""
    yield from picture(measured_links(report))
    yield from _bandwidths(report.results)
    yield from _loaded(report.results)
    yield from _remarks(report.results)
    yield f"took {report.seconds:.0f} s"


def header(machine: Machine) -> Iterator[str]:
    """What was measured with, and on what: a line each."""
    yield ", ".join(f"{name} {version}" for name, version in machine.versions.items() if version)
    yield "NUMA: " + ", ".join(f"dram{number} with {cores} cores" for number, cores in machine.numa.items())
    for gpu in machine.gpus:
        node = "unknown" if gpu.numa_node is None else f"dram{gpu.numa_node}"
        yield (
            f"hbm{gpu.index}: {gpu.name}, PCIe generation {_or_unknown(gpu.pcie_generation)} "
            f"of {_or_unknown(gpu.pcie_generation_max)}, x{_or_unknown(gpu.pcie_width)}, nearest to {node}, "
            f"SM clock {_or_unknown(gpu.sm_clock_mhz)} of {_or_unknown(gpu.sm_clock_max_mhz)} MHz"
        )
    for directory in machine.directories:
        yield f"nvme: {directory.path}, {directory.filesystem}"
    yield "GDS: in use" if machine.gds_obstacle is None else f"GDS: not in use, {machine.gds_obstacle}"


def picture(links: LinksConfig) -> Iterator[str]:
    """The tiers in a row, with the bandwidth of each link in GB/s: a line each."""
    rate = {lane: "    ?" if value is None else f"{value / 1e9:5.1f}" for lane, value in asdict(links).items()}
    yield f"hbm  ──{rate['d2h']} ─▶  dram  ──{rate['disk_write']} ─▶  nvme      GB/s"
    yield f"     ◀─{rate['h2d']} ──        ◀─{rate['disk_read']} ──"
    yield ""


def short_size(nbytes: int) -> str:
    """A size as the head of a narrow column: ``64K``, ``1G``."""
    for unit, letter in ((GiB, "G"), (MiB, "M"), (KiB, "K")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit}{letter}"
    return str(nbytes)


def _bandwidths(results: Sequence[PathResult]) -> Iterator[RenderableType]:
    measured = [result for result in results if result.samples]
    sizes = sorted({sample.size for result in measured for sample in result.samples})
    if not sizes:
        return
    # Padded on one side: ten sizes and the paths' names have to fit into 80 columns.
    table = Table("path", box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left")
    table.title = "GB/s by size of a copy"
    for size in sizes:
        table.add_column(short_size(size), justify="right")
    for result in measured:
        by_size = {sample.size: _rate(sample.bandwidth) for sample in result.samples}
        style = "red" if result.status == "failed" else None
        table.add_row(result.path.label, *(by_size.get(size, "") for size in sizes), style=style)
    yield table


def _loaded(results: Sequence[PathResult]) -> Iterator[RenderableType]:
    measured = [result for result in results if result.loaded]
    if not measured:
        return
    table = Table("path", box=box.SIMPLE, pad_edge=False, title_justify="left")
    table.title = "GB/s while processes copy in host memory (in brackets: what they read and write)"
    for sample in measured[0].loaded:
        table.add_column(f"{sample.workers} busy", justify="right")
    for result in measured:
        cells = (f"{_rate(sample.bandwidth)} ({sample.host_traffic / 1e9:.0f})" for sample in result.loaded)
        table.add_row(result.path.label, *cells)
    yield table


def _remarks(results: Sequence[PathResult]) -> Iterator[Text]:
    """One line per reason, with every path that it holds for."""
    groups: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.reason:
            groups.setdefault((result.status, result.reason), []).append(result.path.label)
    for (status, reason), labels in groups.items():
        said = "" if status == "measured" else f"{status}: "
        yield Text(f"{said}{', '.join(labels)}: {reason}", style="red" if status == "failed" else "yellow")


def _rate(bandwidth: float) -> str:
    rate = bandwidth / 1e9
    return f"{rate:.1f}" if rate >= 0.95 else f"{rate:.2f}"


def _or_unknown(number: int | None) -> str:
    return "unknown" if number is None else str(number)
