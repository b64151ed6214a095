"""A report as a picture, with matplotlib (extra ``plot``)."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from torch_tiers.allocator.errors import TiersError
from torch_tiers.probe.results import PathResult, Report
from torch_tiers.probe.table import short_size

FORMATS = (".pdf", ".png", ".svg")


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]


def by_size(results: tuple[PathResult, ...]) -> list[Series]:
    """Bandwidth in GB/s over the size of a copy in bytes."""
    return [
        Series(
            result.path.label,
            tuple(sample.size for sample in result.samples),
            tuple(sample.bandwidth / 1e9 for sample in result.samples),
        )
        for result in results
        if result.samples
    ]


def by_traffic(results: tuple[PathResult, ...]) -> list[Series]:
    """Bandwidth in GB/s over the host traffic in GB/s."""
    return [
        Series(
            result.path.label,
            tuple(sample.host_traffic / 1e9 for sample in result.loaded),
            tuple(sample.bandwidth / 1e9 for sample in result.loaded),
        )
        for result in results
        if result.loaded
    ]


def check(path: Path, *, force: bool) -> None:
    """Raise TiersError if no plot could be written to `path`: asked before minutes are spent measuring."""
    if find_spec("matplotlib") is None:
        raise TiersError("--plot needs matplotlib: pip install matplotlib")
    if path.suffix.lower() not in FORMATS:
        raise TiersError(f"{path}: a plot is one of {', '.join(FORMATS)}")
    try:
        if not path.absolute().parent.is_dir():
            raise TiersError(f"{path.parent} is not a directory")
        if path.exists() and not force:
            raise TiersError(f"{path} exists; --force replaces it")
    except OSError as error:
        raise TiersError(f"{path} cannot be written: {error.strerror}; name another file") from None


def draw(report: Report, path: Path) -> None:
    """Draw the chart of sizes and, if there was load, that of host traffic beside it."""
    from matplotlib.figure import Figure  # the object, not pyplot, which would look for a display
    from matplotlib.ticker import LogLocator, NullFormatter

    loaded = by_traffic(report.results)
    figure = Figure(figsize=(16 if loaded else 9, 6), layout="constrained")
    axes = figure.subplots(1, 2 if loaded else 1, squeeze=False)[0]
    series = by_size(report.results)
    sizes = sorted({x for line in series for x in line.x})
    for line in series:
        axes[0].plot(line.x, line.y, marker="o", label=line.label)
    axes[0].set_xscale("log", base=2)
    axes[0].set_xticks(sizes, [short_size(int(size)) for size in sizes])
    axes[0].set(xlabel="size of a copy", yscale="log")
    axes[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[0].yaxis.set_major_formatter("{x:g}")  # 0.5, 20: a reader of bandwidths wants no powers of ten
    axes[0].yaxis.set_minor_formatter(NullFormatter())
    for line in loaded:
        axes[1].plot(line.x, line.y, marker="o", label=line.label)
    if loaded:
        axes[1].set(xlabel="host traffic, GB/s read and written", ylim=(0, None))
    for chart in axes:
        chart.set_ylabel("GB/s")
        chart.grid(alpha=0.3)
        if chart.lines:
            chart.legend(fontsize="small")
    try:
        figure.savefig(path)
    except OSError as error:
        raise TiersError(f"{path} cannot be written: {error.strerror}") from error
