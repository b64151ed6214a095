"""What was measured, a JSON object a line, and the table of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.zoo.program import PROGRAMS
from benchmarks.zoo.run import LAST

GiB = 1 << 30
PLAIN, OWN, AGAIN = "plain", "checkpoint", "again"
IN_TURNS = " in turns"  # after a budget
KEPT = 1.005  # times the budget: what counts as within
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
    head = ["program", "plain, ms", "plain, GiB", "state", *(f"at {budget}%" for budget in budgets)]
    head += ["own checkpointing", "plain, again", "measured / predicted", "ideal / plain", "losses"]
    rows, failed = [head, ["---"] * len(head)], []
    for program in PROGRAMS:
        runs = {variant: record for (of, variant), record in found.items() if of == program}
        failed += [
            f"- {program}, {_named(name)}: {run['status']}: {run['error']}" for name, run in runs.items() if _bad(run)
        ]
        plain = runs.get(PLAIN)
        if plain is None or _bad(plain):
            continue
        ours = [runs.get(str(budget)) for budget in budgets]
        cells = [program, f"{plain['ms']:.1f}", f"{plain['reserved'] / GiB:.1f}"]
        cells.append(f"{plain['state'] / max(plain['reserved'], 1):.0%}" if plain["reserved"] else "")
        cells += [_at_budget(run, plain) for run in ours]
        cells += [_beside(runs.get(OWN), plain), _beside(runs.get(AGAIN), plain)]
        cells.append(", ".join(_share(run, "ms", run, "predicted_ms") for run in ours))
        cells.append(", ".join(_share(run, "ideal_ms", plain, "ms") for run in ours))
        cells.append(_losses(runs, budgets))
        rows.append(cells)
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    notes = [
        "",
        "Fractions are of plain's speed; in brackets GiB reserved / budget, or reserved as a share of plain's. Budgets "
        "are of what plain reserves, or where more than 30% of that is state, of the rest beside it. *Ideal* is what "
        "tiers takes for the program's own step; ~ marks plans that changed in the steps that are timed.",
    ]
    return "\n".join([*lines, *notes, *_about(found.values()), *([""] if failed else []), *failed])


def _about(records: Iterable[Record]) -> list[str]:
    """What it ran on, and whether that was the same all the time."""
    done = [record for record in records if not _bad(record) and record.get("device")]
    if not done:
        return []
    cards = ", ".join(sorted({f"{record['device']}, torch {record['torch']}" for record in done}))
    clocks = [record["clock"] for record in done if record.get("clock")]
    hosts = [record["host_us"] for record in done]
    told = [f"{min(clocks)} to {max(clocks)} MHz when runs ended"] if clocks else []
    told.append(f"{min(hosts):.0f} to {max(hosts):.0f} us of the host for a fixed piece of the interpreter's work")
    return ["", f"On {'; '.join([cards, *told])}."]


def in_turns(found: Mapping[tuple[str, str], Record]) -> str:
    """What was found with plain and tiers in turns, as a table in markdown, or nothing."""
    lines = []
    for (program, variant), record in found.items():
        if variant.endswith(IN_TURNS) and not _bad(record):
            median, high, low = (1 / record["ratio"][name] for name in ("median", "low", "high"))
            cells = [program, f"{variant.removesuffix(IN_TURNS)}%", f"{record['plain_ms']:.1f}", f"{record['ms']:.1f}"]
            lines.append(f"| {' | '.join(cells)} | {median:.3f} ({low:.3f} to {high:.3f}) |")
    head = ["", "In turns:", "", "| program | budget | plain, ms | tiers, ms | fraction (95%) |", "| --- " * 5 + "|"]
    return "\n".join([*head, *lines, ""]) if lines else ""


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
    over = ", **over**" if run["reserved"] > KEPT * run["budget"] > 0 else ""
    learning = "~" if run.get("settled", LAST) < LAST else ""
    memory = f"{run['reserved'] / GiB:.1f} / {run['budget'] / GiB:.1f}{over}"
    return f"{learning}{plain['ms'] / run['ms']:.3f} ({memory})"


def _beside(run: Record | None, plain: Record) -> str:
    if run is None or _bad(run):
        return "" if run is None else str(run["status"])
    return f"{plain['ms'] / run['ms']:.3f} ({run['reserved'] / max(plain['reserved'], 1):.0%})"


def _share(run: Record | None, name: str, other: Record | None, base: str) -> str:
    """One number as a multiple of another."""
    if run is None or other is None or _bad(run) or not run.get(name) or not other.get(base):
        return "-"
    return f"{run[name] / other[base]:.2f}"


def _losses(runs: Mapping[str, Record], budgets: Sequence[int]) -> str:
    """Where losses part from plain's: of the same program run plainly again, first, as it may not equal itself."""
    names = {AGAIN: "plain itself", **{str(budget): f"{budget}%" for budget in budgets}}
    done = {name: runs[name] for name in names if name in runs and not _bad(runs[name])}
    parted = {name: apart(runs[PLAIN]["losses"], run["losses"]) for name, run in done.items()}
    told = [f"{names[name]}: from step {at[0]}, by {at[1]:.1e}" for name, at in parted.items() if at is not None]
    return "; ".join(told) or ("equal" if done else "")
