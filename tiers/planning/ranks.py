"""The ranks of a run beside each other: sums, the slowest, and how far they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table

from torch_tiers.allocator.sizes import format_size
from torch_tiers.run_directory import by_iteration, step_seconds

_SHOWN = 16  # ranks in a row each; of more the first ones


def slowest(ranks: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the name of the rank whose steps take longest; `ranks` has the content of each stats.json, one at least.

    Where ranks wait for each other they all take about as long, so of equal ones it is the one that stalls most.
    """
    return max(ranks, key=lambda name: (round(step_seconds(ranks[name]) or 0.0, 4), _stalled(ranks[name])))


def to_json(ranks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The ranks as JSON; seconds are of a step, and of an iteration's stalls."""
    return {
        name: {
            "step_s": step_seconds(stats),
            "stalled_s": _stalled(stats),
            "peak": stats["peak"],
            "moved": sum(stats["moved"].values()),
        }
        for name, stats in ranks.items()
    }


def render(ranks: Mapping[str, Mapping[str, Any]]) -> Iterator[RenderableType]:
    """The ranks as a table with their sums, and what differs; what is printed next is of the slowest."""
    table = Table("rank", "step", "stalled", "peak hbm", "peak dram", "moved in all", box=SIMPLE_HEAD)
    for name, stats in [*ranks.items()][:_SHOWN]:
        step, peak = step_seconds(stats), stats["peak"]
        took = "unknown" if step is None else _ms(step)
        moved = sum(stats["moved"].values())
        table.add_row(name, took, _ms(_stalled(stats)), *map(format_size, (peak["hbm"], peak.get("dram", 0), moved)))
    all_of = [*ranks.values()]
    sums = (
        *(sum(stats["peak"].get(tier, 0) for stats in all_of) for tier in ("hbm", "dram")),
        sum(sum(stats["moved"].values()) for stats in all_of),
    )
    table.add_section()
    table.add_row("sum", "", "", *map(format_size, sums))
    yield table
    if len(ranks) > _SHOWN:
        yield f"the sums have {len(ranks) - _SHOWN} more ranks, which --json lists"
    known = [seconds for stats in all_of if (seconds := step_seconds(stats)) is not None]
    differ = f"steps differ by {_ms(max(known) - min(known))} from rank to rank" if known else "no step was completed"
    peaks = [stats["peak"]["hbm"] for stats in all_of]
    yield f"{differ}, peaks of hbm by {format_size(max(peaks) - min(peaks))}; of {slowest(ranks)}, the slowest:"


def _stalled(stats: Mapping[str, Any]) -> float:
    return sum(by_iteration(stats)[1].values())


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
