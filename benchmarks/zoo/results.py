"""What was measured, a JSON object a line, and the table of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.zoo.program import PROGRAMS

GiB = 1 << 30
PLAIN, OWN, AGAIN = "plain", "checkpoint", "again"
OK = "ok"
Record = Mapping[str, Any]


def read(path: Path) -> list[Record]:
    """All records of a file, which need not be there; half a line at its end is what a killed driver left."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def latest(records: Sequence[Record], size: str, steps: int) -> dict[tuple[str, str], Record]:
    """By program and variant the record that was written last."""
    wanted = (record for record in records if (record["size"], record["steps"]) == (size, steps))
    return {(record["program"], record["variant"]): record for record in wanted}


def table(found: Mapping[tuple[str, str], Record], budgets: Sequence[int]) -> str:
    """What was found, as a table in markdown with what failed below it."""
    head = [
        "program",
        "plain, ms",
        "plain, GiB",
        *(f"at {budget}%" for budget in budgets),
        "own checkpointing",
        "plain, again",
    ]
    head += ["step: measured / predicted", "losses"]
    rows, failed = [head, ["---"] * len(head)], []
    for program in PROGRAMS:
        runs = {variant: record for (of, variant), record in found.items() if of == program}
        failed += [
            f"- {program}, {_named(name)}: {run['status']}: {run['error']}" for name, run in runs.items() if _bad(run)
        ]
        plain = runs.get(PLAIN)
        if plain is None or _bad(plain):
            continue
        cells = [program, f"{plain['ms']:.1f}", f"{plain['reserved'] / GiB:.1f}"]
        cells += [_at_budget(runs.get(str(budget)), plain) for budget in budgets]
        cells += [_beside(runs.get(OWN), plain), _beside(runs.get(AGAIN), plain)]
        cells.append(", ".join(_prediction(runs.get(str(budget))) for budget in budgets))
        cells.append(_losses(runs, budgets))
        rows.append(cells)
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    notes = [
        "",
        "Fractions are of plain's speed; in brackets GiB reserved / budget, or reserved as a share of plain's.",
    ]
    return "\n".join([*lines, *notes, *([""] if failed else []), *failed])


def apart(losses: Sequence[str], others: Sequence[str]) -> tuple[int, float] | None:
    """The first step, counted from 1, where losses differ, and by how much at most, relatively; None if nowhere."""
    pairs = list(zip(map(float.fromhex, losses), map(float.fromhex, others), strict=False))
    differ = [k for k, (a, b) in enumerate(pairs, 1) if a != b and not (math.isnan(a) and math.isnan(b))]
    if not differ:
        return None
    return differ[0], max(_relative(*pairs[k - 1]) for k in differ)


def _relative(a: float, b: float) -> float:
    difference = abs(a - b) / max(abs(a), 1e-30)
    return math.inf if math.isnan(difference) else difference


def _bad(record: Record) -> bool:
    return bool(record["status"] != OK)


def _named(variant: str) -> str:
    return f"{variant}%" if variant.isdigit() else variant


def _at_budget(run: Record | None, plain: Record) -> str:
    if run is None or _bad(run):
        return "" if run is None else str(run["status"])
    return f"{plain['ms'] / run['ms']:.3f} ({run['reserved'] / GiB:.1f} / {run['budget'] / GiB:.1f})"


def _beside(run: Record | None, plain: Record) -> str:
    if run is None or _bad(run):
        return "" if run is None else str(run["status"])
    return f"{plain['ms'] / run['ms']:.3f} ({run['reserved'] / max(plain['reserved'], 1):.0%})"


def _prediction(run: Record | None) -> str:
    if run is None or _bad(run) or not run.get("predicted_s") or not run.get("measured_s"):
        return "-"
    return f"{run['measured_s'] / run['predicted_s']:.2f}"


def _losses(runs: Mapping[str, Record], budgets: Sequence[int]) -> str:
    """Where losses part from plain's: of the same program run plainly again, first, as it may not equal itself."""
    names = {AGAIN: "plain itself", **{str(budget): f"{budget}%" for budget in budgets}}
    done = {name: runs[name] for name in names if name in runs and not _bad(runs[name])}
    parted = {name: apart(runs[PLAIN]["losses"], run["losses"]) for name, run in done.items()}
    told = [f"{names[name]}: from step {at[0]}, by {at[1]:.1e}" for name, at in parted.items() if at is not None]
    return "; ".join(told) or ("equal" if done else "")
