"""What was measured, a JSON object a line, and the table of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.zoo.program import NOT_REPEATABLE, PROGRAMS

GiB = 1 << 30
PLAIN, OWN = "plain", "checkpoint"
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
    head = ["program", "plain, ms", "plain, GiB", *(f"at {budget}%" for budget in budgets), "own checkpointing"]
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
        cells.append(_own(runs.get(OWN), plain))
        cells.append(", ".join(_prediction(runs.get(str(budget))) for budget in budgets))
        cells.append(_losses(program, plain, {budget: runs.get(str(budget)) for budget in budgets}))
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


def _own(run: Record | None, plain: Record) -> str:
    if run is None or _bad(run):
        return "" if run is None else str(run["status"])
    return f"{plain['ms'] / run['ms']:.3f} ({run['reserved'] / max(plain['reserved'], 1):.0%})"


def _prediction(run: Record | None) -> str:
    if run is None or _bad(run) or not run.get("predicted_s") or not run.get("measured_s"):
        return "-"
    return f"{run['measured_s'] / run['predicted_s']:.2f}"


def _losses(program: str, plain: Record, runs: Mapping[int, Record | None]) -> str:
    told = list(_differences(plain, runs))
    if not told:
        return "equal" if any(run is not None and not _bad(run) for run in runs.values()) else ""
    why = f" ({NOT_REPEATABLE[program]})" if program in NOT_REPEATABLE else ""
    return "; ".join(told) + why


def _differences(plain: Record, runs: Mapping[int, Record | None]) -> Iterator[str]:
    for budget, run in runs.items():
        if run is not None and not _bad(run) and (found := apart(plain["losses"], run["losses"])):
            yield f"{budget}%: from step {found[0]}, by {found[1]:.1e}"
