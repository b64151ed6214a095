"""Which module moves most? What the plan does with saved tensors, summed up the tree of modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table

from torch_tiers.allocator.sizes import format_size
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace

ROWS = 20  # that a screen has room for
OUTSIDE = "(no module)"


@dataclass(slots=True)
class Sum:
    """Bytes that a module and all within it save, in an iteration, by what the plan does with them."""

    moved: int = 0
    recomputed: int = 0
    kept: int = 0

    def add(self, other: Sum) -> None:
        """Count those of another, too."""
        self.moved += other.moved
        self.recomputed += other.recomputed
        self.kept += other.kept

    @property
    def rank(self) -> tuple[int, int, int]:
        """What it is sorted by."""
        return self.moved, self.recomputed, self.kept


def by_module(trace: Trace, plan: Plan) -> dict[str, Sum]:
    """What each module saves itself, by its path. A storage counts where it is saved first.

    A site that the plan does not know moves, with a group of its iteration's own.
    """
    recomputed = set(plan.recompute)
    found: dict[str, Sum] = {}
    seen = set()
    for site in trace.sites:
        if site.storage in seen:
            continue
        seen.add(site.storage)
        nbytes = trace.storage_bytes[site.storage]
        what = found.setdefault(site.key.rpartition(":")[0], Sum())
        if site.key in plan.keep:
            what.kept += nbytes
        elif site.key in recomputed:
            what.recomputed += nbytes
        else:
            what.moved += nbytes
    return found


def folded(sums: dict[str, Sum], rows: int = ROWS) -> dict[str, Sum]:
    """Sum up to the greatest depth at which there are no more than so many modules, the one that moves most first."""
    deepest = max((path.count(".") + 1 for path in sums), default=1)
    for depth in range(deepest, 0, -1):
        found: dict[str, Sum] = {}
        for path, what in sums.items():
            found.setdefault(".".join(path.split(".")[:depth]), Sum()).add(what)
        found = {path: what for path, what in found.items() if any(what.rank)}
        if len(found) <= rows:
            break
    return dict(sorted(found.items(), key=lambda item: item[1].rank, reverse=True)) if sums else {}


def to_json(sums: dict[str, Sum]) -> dict[str, Any]:
    """All modules that save something, by path."""
    return {
        path: {"moved": what.moved, "recomputed": what.recomputed, "kept": what.kept}
        for path, what in folded(sums, len(sums)).items()
    }


def render(sums: dict[str, Sum]) -> Iterator[RenderableType]:
    """A table of the modules at the depth that fits, and a sentence about the first."""
    rows = folded(sums)
    whole = Sum()
    for what in rows.values():
        whole.add(what)
    if not any(whole.rank):
        yield "no module saves anything that could move"
        return
    if whole.moved:
        first, most = next(iter(rows.items()))
        alike = sum(what.moved == most.moved for what in rows.values()) - 1
        who = f"{first or OUTSIDE} moves most" if not alike else f"{first or OUTSIDE} and {alike} more move most, each"
        share = f"{most.moved / whole.moved:.0%} of the {format_size(whole.moved)}"
        yield f"{who} {format_size(most.moved)}: {share} that leave hbm in an iteration, by the last plan"
    else:
        yield "nothing moves under this plan"
    table = Table("module", "moved", "recomputed", "kept", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for path, what in [*rows.items()][:ROWS]:
        table.add_row(path or OUTSIDE, *map(_size, what.rank))
    if len(rows) > ROWS:
        table.add_row(f"{len(rows) - ROWS} more")
    table.add_row("all", *map(_size, whole.rank))
    yield table


def _size(nbytes: int) -> str:
    return format_size(nbytes) if nbytes else ""
