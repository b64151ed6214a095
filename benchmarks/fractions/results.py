"""The file of results: what was measured, by machine, code and cell; written after each cell."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.fractions.cells import Cell, parse

Record = dict[str, Any]
FORMAT = 1
CELL = ("machine", "code", "workload", "budget", "method")
TRY = ("machine", "code", "workload", "method", "batch")
EACH = ("steps", "ideal_steps", "losses")  # what a record has of each step


class Results:
    """What a file holds.

    Parameters
    ----------
    path
        PlannedIteration when the first record is put; None keeps nothing.

    Raises
    ------
    ValueError
        If the file is of another format.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.cells: list[Record] = []
        self.tries: list[Record] = []
        if path is not None and path.exists():
            found = json.loads(path.read_text())
            if found.get("format") != FORMAT:
                raise ValueError(f"{path} is of format {found.get('format')!r}, not {FORMAT}: name another file")
            self.cells, self.tries = found["cells"], found["tries"]

    def put_cell(self, record: Record) -> None:
        """Keep a cell, in the place of an earlier measurement of it."""
        _replace(self.cells, record, CELL)
        self._write()

    def put_try(self, record: Record) -> None:
        """Keep what one batch came to, in the place of an earlier measurement of it."""
        _replace(self.tries, record, TRY)
        self._write()

    def find(self, machine: str, code: str, cell: Cell) -> Record | None:
        """The record of a cell, if it was measured with that code."""
        wanted = (machine, code, cell.workload, cell.budget, cell.method.name)
        return next((record for record in self.cells if _key(record, CELL) == wanted), None)

    def find_try(self, machine: str, code: str, workload: str, method: str, batch: int) -> Record | None:
        """The record of a batch, if it was tried with that code."""
        wanted = (machine, code, workload, method, batch)
        return next((record for record in self.tries if _key(record, TRY) == wanted), None)

    def expected(self, machine: str, cell: Cell, otherwise: float) -> float:
        """Seconds that a cell will take, by what it and others of its workload took."""
        took = [
            (record["method"], record["took"])
            for record in self.cells
            if (record["machine"], record["workload"]) == (machine, cell.workload) and record["status"] != "skipped"
        ]
        same = [seconds for method, seconds in took if method == cell.method.name]
        return max(same) if same else mean(seconds for _, seconds in took) if took else otherwise

    def best(self, machine: str, workload: str, budget: int) -> Record | None:
        """The fastest uncompiled method so far that fits a budget, whatever code it was measured with."""
        fitting = [
            record
            for record in self.cells
            if (record["machine"], record["workload"]) == (machine, workload)
            and record["budget"] in (budget, None)
            and not record.get("compiled")
            and record["method"] != "ideal"
            and fits(record, budget)
        ]
        return max(fitting, key=lambda record: record["fraction"], default=None)

    def merge(self, other: Results) -> None:
        """Take over what another file has that this one lacks, or has from an earlier time."""
        for mine, theirs, names in ((self.cells, other.cells, CELL), (self.tries, other.tries, TRY)):
            known = {_key(record, names): record["when"] for record in mine}
            for record in theirs:
                if record["when"] > known.get(_key(record, names), ""):
                    _replace(mine, record, names)
        self._write()

    def condense(self) -> None:
        """Keep what was measured last, and of that no single steps."""
        for records in (self.cells, self.tries):
            records[:] = [{k: v for k, v in record.items() if k not in EACH} for record in current(records)]
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": FORMAT, "cells": self.cells, "tries": self.tries}, indent=1)
        with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False) as file:
            file.write(text + "\n")
        os.chmod(file.name, 0o644)
        os.replace(file.name, self._path)  # who is killed meanwhile leaves the file as it was


def fits(record: Record, budget: int) -> bool:
    """Whether a measurement stayed within `budget` percent of what the plain program reserves."""
    return record["status"] == "ok" and bool(record["reserved"] <= record["plain_reserved"] * budget / 100)


def current(records: Sequence[Record]) -> list[Record]:
    """Each cell or try as it was measured last: ours on whatever machine that was, peers on each."""
    last: dict[tuple[object, ...], Record] = {}
    for record in sorted(records, key=lambda record: record["when"]):
        machine = None if parse(record["method"]).ours else record["machine"]
        last[machine, record["workload"], record.get("budget"), record["method"], record.get("batch")] = record
    return list(last.values())


def _key(record: Record, names: Sequence[str]) -> tuple[object, ...]:
    return tuple(record[name] for name in names)


def _replace(records: list[Record], record: Record, names: Sequence[str]) -> None:
    key = _key(record, names)
    records[:] = [other for other in records if _key(other, names) != key]
    records.append(record)
