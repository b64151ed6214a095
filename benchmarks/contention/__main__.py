"""The command line; see the package."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

import benchmarks.contention
import torch_tiers as tiers
from benchmarks import workloads
from benchmarks.alternate import sm_clock
from benchmarks.contention.loads import Copies, Jpegs, Load, Span
from benchmarks.contention.plain import Plain
from benchmarks.contention.report import NONE, Cell, table
from benchmarks.contention.switch import Switch
from benchmarks.counts import per_step
from benchmarks.settling import plans
from torch_tiers.allocator.sizes import format_size
from torch_tiers.assembly import Session
from torch_tiers.monitor.calibration import Calibration

BATCHES = {"reference_gpt": 8, "resnet152": 256}
WARM = 4  # steps of plain training before the first that counts
FEW = 12  # steps without a change, after which none is to come where nobody watches, or has made room
RECOVERY = 60  # steps at most in which the monitor may find that a load is over
LONGEST = 4  # times the steps without a change, after which what changes all the time is measured as it is


class Bench:
    """Runs cells.

    Parameters
    ----------
    settle, window, turns
        Steps without a change that come before the timed ones; steps of a turn; and how many turns ours and plain
        training have each, half as many where there is no load.
    keep
        Given all cells after each: a run on a lent machine may be ended at any time.
    """

    def __init__(
        self,
        step: Callable[[], torch.Tensor],
        plain: Plain,
        batch: int,
        settle: int,
        window: int,
        turns: int,
        keep: Callable[[Sequence[Cell]], object] = len,
    ) -> None:
        self._step, self._plain, self._batch, self._keep = step, plain, batch, keep
        self._quiet, self._window, self._turns = settle, window, turns
        self.cells: list[Cell] = []

    def alone(self, load: Load, seconds: float) -> None:
        """The load without any training."""
        load.switch(True)
        time.sleep(seconds / 2)
        begin = load.note()
        time.sleep(seconds)
        rate = load.rate([(begin, load.note())])
        load.switch(False)
        self._add(Cell(0, load.name, "alone", 0.0, rate))

    def cell(self, number: int, load: Load | None, variant: str, session: Session, switch: Switch) -> None:
        """Training beside the load, or beside nothing."""
        switch.set(variant == "on")
        if load is not None:
            load.switch(True)
        settled, lanes, reaction = self.settle(session, switch)
        self._step().item()  # the device is through: it would give plain's turn slices, in which our copies look slow
        note = time.monotonic if load is None else load.note
        before, busy, watching = session.stats(), 0.0, switch.cpu
        steps: list[tuple[float, ...]] = []
        ours: list[Span] = []
        plain: list[Span] = []
        turns = self._turns if load else -(-self._turns // 2)  # nothing but training has to be told apart
        for _ in range(turns):
            begin = note()
            self._plain.train(self._window)
            between, spent = note(), time.process_time()
            steps.append(self._train(self._window))
            end, busy = note(), busy + time.process_time() - spent
            plain.append((begin, between))
            ours.append((between, end))
        counts = per_step(before, session.stats(), turns * self._window)
        took, watched = (sum(end - begin for begin, end in spans) for spans in (ours, [*ours, *plain]))
        cell = Cell(
            number,
            load.name if load else NONE,
            variant,
            training=self._samples(ours),
            preprocessing=load.rate(ours) if load else 0.0,
            plain_training=self._samples(plain),
            plain_preprocessing=load.rate(plain) if load else 0.0,
            moved=sum(counts["moved"].values()),
            stalls=counts["stalls"],
            pages=counts.get("pages", {}),
            flushes=counts.get("flushes", 0.0),
            cores=busy / took,
            monitor_cores=(switch.cpu - watching) / watched,  # it goes on while plain has its turn
            steps=tuple(steps),
            lanes=tuple(lanes),
            reaction=reaction,
            settled=settled,
            sm_clock=sm_clock(),
        )
        if load is not None:
            load.switch(False)
        if switch.monitor is not None:
            watch = switch.monitor.watch
            host = 1e6 * median(switch.times) if switch.times else 0.0
            cell = replace(cell, share=watch.backoff.share, host_us=host, changes=tuple(watch.changes))
            if number == 0 and cell.share < 1:  # once a load: it takes as long as a turn
                cell = replace(cell, recovery=self.recover(switch))
        self._add(cell)

    def settle(self, session: Session, switch: Switch) -> tuple[bool, list[float | None], int | None]:
        """Train until nothing has changed for so many steps, and will soon.

        Returns
        -------
        whether that came about; the least that a lane gave in each step until the monitor made room, None where it had
        not looked again; and the step in which it did, None if it did not

        The monitor has to see the load, answer, and have planned; then another plan is begun with, in three steps, for
        which pages are mapped.
        """
        last: tuple[object, ...] = ()
        quiet, reaction = 0, None
        lanes: list[float | None] = []
        for number in range(1, LONGEST * self._quiet + 1):
            self._step()
            if reaction is None:
                lanes.append(switch.look())
                reaction = number if switch.share < 1 else None
            pages, told = session.stats()["pages"], plans(session)
            now = told.now, pages and pages["maps"], switch.share
            quiet = quiet + 1 if now == last and told.stay and not told.coming else 0
            last = now
            waits = switch.monitor is not None and switch.share == 1  # for what it has not seen so far
            if quiet >= (self._quiet if waits else min(self._quiet, FEW)):
                return True, lanes, reaction
        print(f"still changing after {LONGEST * self._quiet} steps", flush=True)
        return False, lanes, reaction

    def recover(self, switch: Switch) -> int:
        """Train until the monitor leaves all there is; how many steps that took, or those after which nobody waited."""
        for number in range(1, RECOVERY):
            self._step()
            if switch.share == 1:
                return number
        return RECOVERY

    def _train(self, steps: int) -> tuple[float, ...]:
        """Seconds of each step, by the host: which is ahead of the device but for the last."""
        times = []
        for _ in range(steps):
            times.append(time.perf_counter())
            loss = self._step()
        loss.item()  # waits for the device
        times.append(time.perf_counter())
        return tuple(end - begin for begin, end in pairwise(times))

    def _samples(self, spans: Sequence[Span]) -> float:
        return self._batch * self._window * len(spans) / sum(end - begin for begin, end in spans)

    def _add(self, cell: Cell) -> None:
        self.cells.append(cell)
        self._keep(self.cells)
        rates = f"{cell.training:.2f} samples/s on {cell.cores:.1f} cores, {cell.preprocessing:.1f} preprocessed"
        if cell.plain_training:
            rates += f"; plain {cell.plain_training:.2f} and {cell.plain_preprocessing:.1f}"
        moved = format_size(int(cell.moved))
        print(
            f"round {cell.round} {cell.load}, {cell.variant}: {rates}; moved {moved} a step, share {cell.share:.2f}",
            flush=True,
        )
        for change in cell.changes:
            print(f"    {change}", flush=True)


def run(options: argparse.Namespace, loads: Sequence[Load]) -> list[Cell]:
    """All cells."""
    start = time.perf_counter()
    plain = Plain(options.workload, options.tiny)
    try:
        return _run(options, loads, plain, start)
    finally:
        plain.close()


def _run(options: argparse.Namespace, loads: Sequence[Load], plain: Plain, start: float) -> list[Cell]:
    measured: dict[str, float] = {}
    if torch.cuda.is_available():
        measured = dict(zip(("d2h", "h2d"), plain.links(), strict=True))
        print(f"links: {measured}")
    plain.train(WARM)
    arguments: dict[str, Any] = {f"links_{lane}": rate for lane, rate in measured.items()}
    if options.hbm:
        arguments["hbm"] = options.hbm
    arguments |= {"policy": options.policy, "dram": options.dram, "allocator": options.allocator, "plan_cache": False}
    beside: list[Load | None] = [*([None] if options.none else []), *loads]
    with tiers.session(monitor_enabled=False, **arguments) as session:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        workload = getattr(workloads, options.workload)(device, tiny=options.tiny)
        keep = partial(write, options, start)
        lengths = options.settle, options.window, options.turns
        bench = Bench(workload.step, plain, BATCHES[options.workload], *lengths, keep)
        for alone in loads:
            bench.alone(alone, options.seconds)
        switch = Switch(Calibration(measured))
        session.runtime.advise(switch)
        switch.set(True)  # learns what lanes give, as in a program that begins before the load
        for _ in range(options.learning):
            workload.step()
        for number in range(options.rounds):
            began = time.perf_counter()
            for load in beside:
                for variant in ("off", "on") if number % 2 == 0 else ("on", "off"):
                    bench.cell(number, load, variant, session, switch)
            if 2 * time.perf_counter() - began - start > 60 * options.minutes:
                print(f"no time for more than {number + 1} rounds")
                break
        switch.set(False)
    return bench.cells


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.contention",
        description=benchmarks.contention.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workload", default="reference_gpt", choices=list(BATCHES))
    parser.add_argument("--tiny", action="store_true", help="the small variant, on a CPU")
    parser.add_argument("--hbm", default=None, help="budget (default: 32GiB; with --tiny whatever there is)")
    parser.add_argument("--dram", default=None, help="(default: 64GiB; with --tiny 64MiB)")
    parser.add_argument("--allocator", default="pages", choices=["torch", "pages"], help="under ours")
    parser.add_argument("--policy", default=None, help="(default: auto; with --tiny move)")
    parser.add_argument("--copies", default=None, help="GB/s, comma-separated (default: 40,80,120; with --tiny 1)")
    parser.add_argument(
        "--workers", type=int, default=None, help="of the DataLoader; 0: no such load (default: all but 2)"
    )
    parser.add_argument("--rounds", type=int, default=None, help="(default: 3; with --tiny 1)")
    parser.add_argument(
        "--settle", type=int, default=24, help="steps without a change before the timed ones; three looks take 3 s"
    )
    parser.add_argument("--no-none", dest="none", action="store_false", help="leave out the cells without a load")
    parser.add_argument("--window", type=int, default=8, help="steps of a turn")
    parser.add_argument("--turns", type=int, default=4, help="of either in a cell")
    parser.add_argument("--learning", type=int, default=64, help="steps until the plans have settled")
    parser.add_argument("--minutes", type=float, default=9.5, help="begin no round with tiers that would end after")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each load alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)

    defaults: dict[str, Any] = {"hbm": "32GiB", "dram": "64GiB", "policy": "auto", "copies": "40,80,120", "rounds": 3}
    defaults["workers"] = max(1, cores - 2)
    if options.tiny:
        defaults = {"hbm": "", "dram": "64MiB", "policy": "move", "copies": "1", "rounds": 1, "workers": 1}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)

    start = time.perf_counter()
    loads: list[Load] = []
    try:
        if options.workers:
            jpegs = Jpegs(options.workers, (64, 64)) if options.tiny else Jpegs(options.workers)
            loads.append(jpegs)
            jpegs.wait()
        loads += [Copies(float(rate) * 1e9, max(1, cores - 2)) for rate in options.copies.split(",") if rate]
        cells = run(options, loads)
        print(f"\n{options.workload}, hbm {options.hbm}, {time.perf_counter() - start:.0f} s")
        print(table(cells))
    finally:  # which takes long where the DataLoader's workers are slow to end
        for load in loads:
            load.close()


def write(options: argparse.Namespace, start: float, cells: Sequence[Cell]) -> None:
    """Write every cell so far where that is asked for."""
    if options.json is None:
        return
    facts = {
        "when": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        # Not where this is written: that is a place on somebody's machine.
        "options": {name: str(value) for name, value in vars(options).items() if name != "json"},
        "seconds": time.perf_counter() - start,
    }
    options.json.write_text(json.dumps({**facts, "cells": [asdict(cell) for cell in cells]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
