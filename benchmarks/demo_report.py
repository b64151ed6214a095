"""What the demo saw, and how rich prints it: tables and a picture. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torch_tiers.allocator.sizes import format_size

TIERS = ("hbm", "dram", "nvme")
LANES = {
    "d2h": "HBM to DRAM",
    "h2d": "DRAM to HBM",
    "disk_write": "DRAM to NVMe",
    "disk_read": "NVMe to DRAM",
    "gds_write": "HBM to NVMe",
    "gds_read": "NVMe to HBM",
}
EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True, slots=True)
class Training:
    """What one run of the example printed: losses with every digit, and milliseconds, of every step."""

    losses: list[str]
    step_ms: list[float]


@dataclass(frozen=True, slots=True)
class Demo:
    """What the demo saw.

    Attributes
    ----------
    needed_hbm
        Peak HBM in bytes with all the memory there is.
    stats
        The ``stats.json`` of the run within the budget.
    """

    plain: Training
    tiers: Training
    needed_hbm: int
    stats: dict[str, Any]

    @property
    def equal(self) -> bool:
        """Whether every loss is the same to the last bit."""
        return self.plain.losses == self.tiers.losses


def bar(part: int, whole: int, width: int = 30) -> str:
    """Draw `part` of `whole` as a bar of `width` characters; a part that is not nothing shows."""
    if part <= 0 or whole <= 0:
        return " " * width
    eighths = min(max(1, math.floor(8 * width * part / whole)), 8 * width)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(width)


def render(demo: Demo) -> RenderableType:
    """Return everything the demo shows."""
    return Group(losses(demo), memory(demo), lanes(demo), times(demo), verdict(demo))


def losses(demo: Demo) -> Table:
    """Return the losses side by side."""
    table = Table("step", "without tiers", "with tiers", "equal", title="Losses")
    for step, (plain, tiers) in enumerate(zip(demo.plain.losses, demo.tiers.losses, strict=True)):
        table.add_row(str(step), plain, tiers, "yes" if plain == tiers else "[red]no[/red]")
    return table


def memory(demo: Demo) -> Table:
    """Return the peak of every tier, all drawn to the scale of what the program needs."""
    table = Table("tier", title="Peak use of each tier")
    for heading in ("peak", "budget"):
        table.add_column(heading, justify="right")
    table.add_column("share of what the program needs")
    table.add_row("needed", format_size(demo.needed_hbm), "", bar(1, 1), style="dim")
    for tier in TIERS:
        peak, budget = demo.stats["peak"][tier], demo.stats["budget"][tier]
        written = "off" if budget is None else format_size(budget)
        table.add_row(tier, format_size(peak), written, bar(peak, demo.needed_hbm))
    return table


def lanes(demo: Demo) -> Table:
    """Return what every lane moved."""
    table = Table("lane", "path", title="Bytes moved")
    for heading in ("in all", "a step"):
        table.add_column(heading, justify="right")
    for lane, path in LANES.items():
        moved = demo.stats["moved"][lane]
        table.add_row(lane, path, format_size(moved), format_size(moved // max(1, demo.stats["steps"])))
    return table


def times(demo: Demo) -> Table:
    """Return the time of a step, and what was waited for."""
    table = Table("", title="Time")
    for heading in ("without tiers", "with tiers"):
        table.add_column(heading, justify="right")
    plain, tiers = median(demo.plain.step_ms), median(demo.tiers.step_ms)
    table.add_row("median step", f"{plain:.1f} ms", f"{tiers:.1f} ms")
    for cause, stall in demo.stats["stalls"].items():
        table.add_row(f"stalled: {cause}", "", f"{stall['seconds'] * 1e3:.1f} ms in {stall['count']} stalls")
    return table


def verdict(demo: Demo) -> Text:
    """Return the line to remember, and why the budget was not kept where it was not."""
    steps = len(demo.plain.losses)
    if not demo.equal:
        same = sum(a == b for a, b in zip(demo.plain.losses, demo.tiers.losses, strict=True))
        return Text(f"Only {same} of {steps} losses are equal.", style="bold red")
    peak, budget = demo.stats["peak"]["hbm"], demo.stats["budget"]["hbm"]
    text = Text(
        f"All {steps} losses are equal to the last bit, with {format_size(peak)} of HBM "
        f"where {format_size(demo.needed_hbm)} were needed ({peak / demo.needed_hbm:.0%}).",
        style="bold green",
    )
    if peak > budget and demo.stats["device"] == "cpu":
        over = f"{format_size(peak - budget)} over the budget, which without a GPU is counted, not enforced"
        text.append(f"\nThat is {over}.", style="not bold yellow")
    return text
