"""What was measured, program by program, and the table of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.zoo import predicted
from benchmarks.zoo.program import PROGRAMS

GiB = 1 << 30
PLAIN, OWN, SAVE_ON_CPU = "plain", "own checkpointing", "save_on_cpu"
Record = Mapping[str, Any]
"""The rows of `tiers bench` by variant, and what the plain run said of the machine; or an error."""


def read(path: Path) -> dict[str, Record]:
    """The records by program of a file, which need not be there."""
    found: dict[str, Record] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write(path: Path, found: Mapping[str, Record]) -> None:
    """Write the file as a whole: who is killed meanwhile leaves it as it was."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1) + "\n")
    part.replace(path)


def table(found: Mapping[str, Record]) -> str:
    """What was found, as a table in markdown with what failed below it."""
    done = {name: found[name] for name in PROGRAMS if name in found and not found[name]["error"]}
    variants = [
        v for v in dict.fromkeys(v for record in done.values() for v in record["rows"]) if v not in (PLAIN, OWN)
    ]
    head = ["program", "plain, ms", "plain, GiB", "state", *variants, OWN, "losses"]
    rows, failed = (
        [head, ["---"] * len(head)],
        [f"- {name}: {one['error']}" for name, one in found.items() if one["error"]],
    )
    for program, record in done.items():
        runs = record["rows"]
        plain = runs[PLAIN]
        memory = plain["memory"] or 0
        cells = [program, f"{1e3 * plain['step']['median']:.1f}", f"{memory / GiB:.1f}"]
        cells.append(f"{record['state'] / memory:.0%}" if memory else "")
        cells += [_cell(runs.get(variant), memory) for variant in (*variants, OWN)]
        told = {name: row["losses"] for name, row in runs.items() if row["losses"] not in ("", "equal")}
        rows.append([*cells, "; ".join(f"{name}: {losses}" for name, losses in told.items()) or "equal"])
        failed += [f"- {program}, {name}: {row['reason']}" for name, row in runs.items() if row["reason"]]
    note = (
        "Fractions are of plain's speed, in brackets the memory as a share of plain's; ~ marks plans that changed late."
    )
    speeds = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([*speeds, "", note, *predicted.table(done), *_about(done.values()), *failed])


def _cell(row: Record | None, plain: int) -> str:
    if row is None or row["fraction"] is None:
        return "" if row is None else "failed"
    of, memory = row["fraction"], f", {row['memory'] / plain:.0%}" if plain and row["memory"] else ""
    spread = "" if of["low"] == of["high"] else f", {of['low']:.3f} to {of['high']:.3f}"
    told = (spread + memory + (", **over**" if row["over"] else "")).removeprefix(", ")
    return ("" if row["settled"] else "~") + f"{of['median']:.3f}" + (f" ({told})" if told else "")


def _about(done: Iterable[Record]) -> list[str]:
    """What it ran on, and whether that was the same all the time."""
    records = list(done)
    if not records:
        return []
    cards = ", ".join(sorted({f"{record['device']}, torch {record['torch']}" for record in records}))
    clocks = [record["clock"] for record in records if record.get("clock")]
    hosts = [record["host_us"] for record in records]
    told = [f"{min(clocks)} to {max(clocks)} MHz when plain runs ended"] if clocks else []
    told.append(f"{min(hosts):.0f} to {max(hosts):.0f} us of the host for a fixed piece of the interpreter's work")
    return ["", f"On {'; '.join([cards, *told])}.", ""]
