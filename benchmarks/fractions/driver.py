"""Measures the cells that are missing, the most valuable first, for as long as there is time. Needs no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median
from typing import Any

from benchmarks.fractions.cells import Cell, Method, code, commit, parse
from benchmarks.fractions.processes import Failed, Setting, TooLong, Worker
from benchmarks.fractions.results import Record, Results, fits
from torch_tiers.allocator.sizes import format_size

GUESS = 60.0  # seconds that a cell takes, before one is known
LAST = 6.0  # seconds that stay for the end of the worker


class OutOfTime(Exception):
    """The time that the run has is over."""


@dataclass
class Run:
    """One run of the driver.

    Attributes
    ----------
    machine
        What the results are of; see `cells.machine`.
    seconds
        When it ends, at the latest.
    timeout
        Seconds that one measurement may take.
    beside
        Whether the best so far runs beside `auto`.
    retry
        Whether what failed or had not settled is measured again.
    """

    results: Results
    machine: str
    setting: Setting
    seconds: float
    timeout: float = 240.0
    beside: bool = False
    retry: bool = False
    start: Callable[[str, Setting], Worker] = Worker
    clock: Callable[[], float] = time.monotonic
    say: Callable[[str], object] = lambda line: print(line, flush=True)
    _worker: Worker | None = field(default=None, init=False)
    _of: str = field(default="", init=False)
    _next: tuple[str, Worker] | None = field(
        default=None, init=False
    )  # a process that starts up for the cell after this
    _plain: dict[str, Record] = field(default_factory=dict, init=False)  # the first ideal of each workload
    _just: tuple[str, Record] | None = field(default=None, init=False)  # the ideal of a workload, if it ran last
    _measured: set[Cell] = field(default_factory=set, init=False)
    _end: float = field(default=0.0, init=False)

    def all(self, wanted: Sequence[Cell]) -> None:
        """Measure what is missing of `wanted`."""
        self._end = self.clock() + self.seconds - LAST
        self._just = None
        missing = [cell for cell in wanted if self._missing(cell)]
        self.say(f"{self.machine}, code {code(ours=True)}: {len(missing)} of {len(wanted)} cells to measure")
        left = 0
        try:
            for number, cell in enumerate(missing):
                if self.clock() + self.results.expected(self.machine, cell, GUESS) > self._end:
                    left += 1  # a shorter one may still be measured
                    continue
                following = missing[number + 1] if number + 1 < len(missing) else None
                try:
                    self._one(cell, following)
                except OutOfTime:
                    left += len(missing) - number
                    break
        finally:
            self._stop()
        self.say(f"{left} cells are left for another run" if left else "all is measured")

    def _missing(self, cell: Cell) -> bool:
        record = self.results.find(self.machine, code(ours=cell.method.ours), cell)
        if record is None or record["status"] == "skipped":
            return True
        return self.retry and (record["status"] == "failed" or not record.get("settled", True))

    def _one(self, cell: Cell, following: Cell | None) -> None:
        if cell in self._measured:
            return
        if self.beside and cell.method.policy == "auto" and cell.budget is not None:
            best = self.results.best(self.machine, cell.workload, cell.budget)
            if best is not None and best["method"] != cell.method.name:
                other = Cell(cell.workload, best["budget"], parse(best["method"]))
                if other not in self._measured:
                    self._sit(other, cell)
        self._sit(cell, following)

    def _sit(self, cell: Cell, following: Cell | None) -> None:
        """Measure the cell between two measurements of the ideal, and keep it, while the `following` one starts up."""
        started = self.clock()
        record: Record = {
            "machine": self.machine,
            "code": code(ours=cell.method.ours),
            "commit": commit(),
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "workload": cell.workload,
            "budget": cell.budget,
            "method": cell.method.name,
            "compiled": cell.method.compiled,
        }
        why_not = cell.method.obstacle(cuda=self.machine != "cpu", trl=self.setting.trl is not None)
        if why_not is not None:
            record |= {"status": "skipped", "reason": why_not}
        else:
            try:
                record |= {"status": "ok", **self._measure(cell, following)}
            except Failed as failed:
                record |= {"status": "failed", "reason": str(failed)}
        record["took"] = self.clock() - started
        self._measured.add(cell)
        self.results.put_cell(record)
        self.say(line(record))

    def _measure(self, cell: Cell, following: Cell | None) -> Record:
        # The one that ran right after the cell before is the one right before this.
        just, self._just = self._just, None
        ideal = just[1] if just and just[0] == cell.workload else self._ask(cell.workload, parse("ideal"), None)
        plain = self._plain.setdefault(cell.workload, ideal)
        hbm = None if cell.budget is None else int(plain["reserved"] * cell.budget / 100)
        measured = self._ask(cell.workload, cell.method, hbm, following)
        # Again: at its power limit a card is 1 to 2% slower some seconds later, which is what many cells are about.
        with suppress(Failed, OutOfTime):  # the method was measured all the same
            after = self._ask(cell.workload, parse("ideal"), None)
            self._just = cell.workload, after
            ideal = ideal | {"steps": ideal["steps"] + after["steps"]}
        return compare(measured, ideal, plain) | {"hbm": hbm}

    def _ask(self, workload: str, method: Method, hbm: int | None, following: Cell | None = None) -> dict[str, Any]:
        left = self._end - self.clock()
        alone = _alone(method)
        worker = self._fresh(workload) if alone else self._worker_of(workload)
        # It takes seconds until a process has imported what it needs: while this one learns, which is not timed.
        if following is not None and _alone(following.method) and self._next is None:
            self._next = following.workload, self.start(following.workload, self.setting)
        try:
            return worker.ask(method.name, hbm, min(self.timeout, left))
        except TooLong:
            if left < self.timeout:
                raise OutOfTime from None
            raise
        finally:
            if alone:
                worker.close()

    def _fresh(self, workload: str) -> Worker:
        """A process that has measured nothing."""
        started, self._next = self._next, None
        if started is not None:
            if started[0] == workload:
                return started[1]
            started[1].close()
        return self.start(workload, self.setting)

    def _worker_of(self, workload: str) -> Worker:
        if self._worker is None or self._of != workload or not self._worker.usable:
            self._stop()
            self._worker, self._of = self.start(workload, self.setting), workload
        return self._worker

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._next is not None:
            self._next[1].close()
            self._next = None


def _alone(method: Method) -> bool:
    """Whether it takes a process of its own: the allocator is chosen before CUDA starts."""
    return method.allocator == "pages"


def compare(measured: Record, ideal: Record, plain: Record) -> Record:
    """What was measured, beside the ideal of the same sitting.

    Parameters
    ----------
    ideal
        Measured right before and right after.
    plain
        The first ideal of the sitting, whose reserved memory budgets are of.
    """
    steps, ideal_steps = measured["steps"], ideal["steps"]
    return measured | {
        "step": median(steps),
        "worst": max(steps),
        "ideal_steps": ideal_steps,
        "ideal_step": median(ideal_steps),
        "ideal_worst": max(ideal_steps),
        "ideal_sm_clock": ideal["sm_clock"],
        "ideal_host_us": ideal["host_us"],
        "fraction": median(ideal_steps) / median(steps),
        "plain_reserved": plain["reserved"],
        "plain_allocated": plain["allocated"],
        "loss_difference": difference(measured["losses"], ideal["losses"]),
        "ideal_loss_difference": difference(ideal["losses"], plain["losses"]),
    }


def difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """The largest relative difference of losses of the same steps; 0 if they are equal."""
    return max((abs(one - other) / abs(other) for one, other in zip(losses, others, strict=False)), default=0.0)


def line(record: Record) -> str:
    """A record in one line."""
    budget = f"{record['budget']}%" if record["budget"] is not None else "any"
    head = f"{record['workload']:<17}{budget:<5}{record['method']:<24}"
    if record["status"] != "ok":
        return f"{head}{record['status']}: {record['reason']}  ({record['took']:.0f} s)"
    over = "" if record["budget"] is None or fits(record, record["budget"]) else "  OVER BUDGET"
    settled = "" if record["settled"] else "  not settled"
    if (pages := record.get("pages")) and (pages["maps"] or pages["departed"] or pages["misplaced"]):
        odd = pages["departed"] + pages["misplaced"]
        settled += f"  {pages['maps']:.0f} pages mapped, {odd:.0f} requests not as foreseen a step"
    return (
        f"{head}{record['fraction']:.3f} of ideal, {record['step'] * 1e3:.1f} ms "
        f"(ideal {record['ideal_step'] * 1e3:.1f}), "
        f"reserved {format_size(record['reserved'])}, SM {record['sm_clock']}, host {record['host_us']:.0f} us  "
        f"({record['took']:.0f} s){settled}{over}"
    )
