"""Training beside preprocessing, with the monitor off and on.

``python -m benchmarks.contention --json contention.json`` on a GPU machine takes less than five minutes;
``python -m benchmarks.contention --tiny`` runs the same code on a CPU in less than one and tells nothing.

A *cell* is one variant beside one load: training runs for some steps until both have settled, then a
window of steps is timed, and what the load does in it is counted. Variants are ``plain`` (no tiers),
``off`` and ``on`` (tiers at a budget that forces moves, without and with the monitor); the last two
alternate within one session, their order turning from round to round. Half of the rounds of ``plain`` come before
that session and half after it, as hosts that others use change. Loads are those of `loads`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import tiers
from allocator.sizes import format_size
from benchmarks import workloads
from benchmarks.activation_path import link_speed
from benchmarks.alternate import sm_clock
from benchmarks.loads import Copies, Jpegs, Load
from migrator.runtime.backoff import Response
from migrator.telemetry.transfers import Transfer
from tiers.monitor.build import available_sensors
from tiers.monitor.calibration import Calibration
from tiers.monitor.sensors import copies as own
from tiers.monitor.thread import Monitor
from tiers.monitor.verdict import Judge
from tiers.monitor.watch import Watch
from tiers.session import Session

NONE = "none"
BATCHES = {"reference_gpt": 8, "resnet152": 256}
FASTER = 1.10  # that training is to be with the monitor where the bus is saturated
NO_SLOWER = 0.98  # that it is to be everywhere
POLITE = 0.95  # of what preprocessing reaches beside plain training


@dataclass(frozen=True, slots=True)
class Cell:
    """One variant beside one load in one round.

    Attributes
    ----------
    training : float
        Samples per second; 0 where nothing trained.
    preprocessing : float
        What the load did, in its unit per second.
    moved : float
        Bytes a step, both directions.
    cores : float
        Processor seconds a second that the training process took, all of its threads.
    share : float
        Of the usual demand that the monitor left at the end; 1 without it.
    host_us : float
        Median host time that handing a period to the monitor took on the training thread, in microseconds.
    """

    round: int
    load: str
    variant: str
    training: float
    preprocessing: float
    moved: float = 0.0
    cores: float = 0.0
    share: float = 1.0
    host_us: float = 0.0
    changes: tuple[str, ...] = ()
    sm_clock: int | None = None


class Switch:
    """The advisor of the session: a fresh monitor while it is on, nobody while it is off."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration  # kept: what a lane can give does not change
        self._choice = available_sensors(probe=False)
        self.monitor: Monitor | None = None
        self.times: list[float] = []

    def set(self, on: bool) -> None:
        if self.monitor is not None:
            self.monitor.close()
        self.monitor, self.times = None, []
        if on:
            copies, judge = own.Copies(self._calibration), Judge(self._calibration)
            self.monitor = Monitor(Watch(lambda: self._choice, copies, judge))

    def period_over(self, transfers: Sequence[Transfer], moved: Mapping[str, int]) -> Response:
        if self.monitor is None:
            return Response()
        start = time.perf_counter()
        response = self.monitor.period_over(transfers, moved)
        self.times.append(time.perf_counter() - start)
        return response


class Bench:
    """Runs cells.

    Parameters
    ----------
    settle, window
        Steps before the timed ones, and those.
    keep
        Given all cells after each: a run on a lent machine may be ended at any time.
    """

    def __init__(
        self,
        step: Callable[[], torch.Tensor],
        batch: int,
        settle: int,
        window: int,
        keep: Callable[[Sequence[Cell]], object] = len,
    ) -> None:
        self._step, self._batch, self._settle, self._window, self._keep = step, batch, settle, window, keep
        self.cells: list[Cell] = []

    def alone(self, load: Load, seconds: float) -> None:
        """The load without any training."""
        load.switch(True)
        time.sleep(seconds / 2)
        load.begin()
        time.sleep(seconds)
        rate = load.rate()
        load.switch(False)
        self._add(Cell(0, load.name, "alone", 0.0, rate))

    def cell(
        self, number: int, load: Load | None, variant: str, session: Session | None, switch: Switch | None
    ) -> None:
        """Training beside the load, or beside nothing."""
        if switch is not None:
            switch.set(variant == "on")
        if load is not None:
            load.switch(True)
        # The monitor has to see the load, answer, and have planned; and a load that stood still begins with a burst,
        # which is all that plain training has to wait for.
        for _ in range(max(1, self._settle // 3) if variant == "plain" else self._settle):
            loss = self._step()
        loss.item()  # waits for the device
        moved, steps = _moved(session), self._window * (load.windows if load is not None else 1)
        start, busy = time.perf_counter(), time.process_time()
        if load is not None:
            load.begin()
        for _ in range(steps):
            loss = self._step()
        loss.item()
        took, busy = time.perf_counter() - start, time.process_time() - busy
        rate = load.rate() if load is not None else 0.0
        if load is not None:
            load.switch(False)
        name = load.name if load else NONE
        cell = Cell(number, name, variant, self._batch * steps / took, rate, cores=busy / took)
        if session is not None:
            cell = replace(cell, moved=(_moved(session) - moved) / steps)
        if switch is not None and switch.monitor is not None:
            watch = switch.monitor.watch
            host = 1e6 * median(switch.times) if switch.times else 0.0
            cell = replace(cell, share=watch.backoff.share, host_us=host, changes=tuple(watch.changes))
        self._add(replace(cell, sm_clock=sm_clock()))

    def _add(self, cell: Cell) -> None:
        self.cells.append(cell)
        self._keep(self.cells)
        moved = format_size(int(cell.moved))
        rates = f"{cell.training:.2f} samples/s on {cell.cores:.1f} cores, {cell.preprocessing:.1f} preprocessed"
        print(
            f"round {cell.round} {cell.load}, {cell.variant}: {rates}, moved {moved} a step, share {cell.share:.2f}",
            flush=True,
        )
        for change in cell.changes:
            print(f"    {change}", flush=True)


def _moved(session: Session | None) -> float:
    return 0.0 if session is None else float(sum(session.stats()["moved"].values()))


def run(options: argparse.Namespace, loads: Sequence[Load]) -> list[Cell]:
    """All cells."""
    cuda, start = torch.cuda.is_available(), time.perf_counter()
    workload = getattr(workloads, options.workload)("cuda" if cuda else "cpu", tiny=options.tiny)
    keep = partial(write, options, start)
    bench = Bench(workload.step, BATCHES[options.workload], options.settle, options.window, keep)
    for load in loads:
        bench.alone(load, options.seconds)
    beside: list[Load | None] = [None, *loads]
    plain = [
        partial(bench.cell, number, load, "plain", None, None) for number in range(options.rounds) for load in beside
    ]
    before = (options.rounds + 1) // 2 * len(beside)
    for measure in plain[:before]:
        measure()
    gc.collect()
    measured: dict[str, float] = {}
    if cuda:
        measured = dict(zip(("d2h", "h2d"), link_speed(), strict=True))
        torch.cuda.empty_cache()
        print(f"links: {measured}")
    arguments: dict[str, Any] = {f"links_{lane}": rate for lane, rate in measured.items()}
    if options.hbm:
        arguments["hbm"] = options.hbm
    with tiers.session(policy=options.policy, dram=options.dram, monitor_enabled=False, **arguments) as session:
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
    for measure in plain[before:]:
        measure()
    return bench.cells


def middle(cells: Sequence[Cell], load: str, variant: str, what: str) -> float:
    """The median over the rounds; 0 where there is no such cell."""
    return float(median([getattr(c, what) for c in cells if (c.load, c.variant) == (load, variant)] or [0.0]))


def table(cells: Sequence[Cell]) -> str:
    """One line a load: fractions of running alone, then what the monitor is to hold."""
    loads = list(dict.fromkeys(cell.load for cell in cells))
    lines = [
        f"{'':<22}{'training, of its own alone':^27} | {'preprocessing, of alone':^33} | {'on/off':>7}{'on/plain':>9}"
        f"{'share':>7}{'moved on/off':>13}",
        f"{'load':<22}{'plain':>9}{'off':>9}{'on':>9} | {'alone':>9}{'plain':>8}{'off':>8}{'on':>8} | "
        f"{'train':>7}{'prep':>9}",
    ]
    for load in loads:
        alone = middle(cells, load, "alone", "preprocessing")
        training = {v: middle(cells, load, v, "training") for v in ("plain", "off", "on")}
        fractions = [_part(training[v], middle(cells, NONE, v, "training")) for v in training]
        prep = {v: middle(cells, load, v, "preprocessing") for v in training}
        parts = [_part(rate, alone) for rate in prep.values()]
        moves = _part(middle(cells, load, "on", "moved"), middle(cells, load, "off", "moved"))
        lines.append(
            f"{load:<22}{''.join(f'{part:>9}' for part in fractions)} | {alone:>9.1f}"
            f"{''.join(f'{part:>8}' for part in parts)} | {_part(training['on'], training['off']):>7}"
            f"{_part(prep['on'], prep['plain']):>9}{middle(cells, load, 'on', 'share'):>7.2f}{moves:>13}"
        )
    rates = ", ".join(f"{v} {middle(cells, NONE, v, 'training'):.2f}" for v in ("plain", "off", "on"))
    lines.append(f"training alone, samples/s: {rates}")
    clocks = [cell.sm_clock for cell in cells if cell.sm_clock is not None]
    if clocks:
        lines.append(f"SM clock: {min(clocks)} to {max(clocks)} MHz, median {median(clocks):.0f}")
    host = [cell.host_us for cell in cells if cell.variant == "on"]
    if host:
        lines.append(f"host time to hand a period to the monitor: {median(host):.0f} us")
    lines += [f"{'holds' if holds else 'DOES NOT HOLD'}: {what}" for what, holds in promises(cells)]
    return "\n".join(lines)


def promises(cells: Sequence[Cell]) -> list[tuple[str, bool]]:
    """What the monitor is to hold, and whether it does in these cells."""
    found = []
    for load in dict.fromkeys(cell.load for cell in cells):
        off, on = (middle(cells, load, variant, "training") for variant in ("off", "on"))
        found.append((f"training beside {load}: with the monitor {on / off:.3f} of without", on >= NO_SLOWER * off))
        if load == NONE:
            continue
        if middle(cells, load, "on", "share") < 1:
            found.append((f"training beside {load}, saturated: at least {FASTER:.2f}", on >= FASTER * off))
        plain, polite = (middle(cells, load, variant, "preprocessing") for variant in ("plain", "on"))
        text = f"{load} keeps {_part(polite, plain)} of what it reaches beside plain training"
        found.append((text, plain > 0 and polite >= POLITE * plain))
    return found


def _part(value: float, of: float) -> str:
    return f"{value / of:.3f}" if of else "-"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workload", default="reference_gpt", choices=list(BATCHES))
    parser.add_argument("--tiny", action="store_true", help="the small variant, on a CPU")
    parser.add_argument("--hbm", default=None, help="budget (default: 32GiB; with --tiny whatever there is)")
    parser.add_argument("--dram", default=None, help="(default: 64GiB; with --tiny 64MiB)")
    parser.add_argument("--policy", default=None, help="(default: auto; with --tiny move)")
    parser.add_argument("--copies", default=None, help="GB/s, comma-separated (default: 40,80,120; with --tiny 1)")
    parser.add_argument(
        "--workers", type=int, default=None, help="of the DataLoader; 0: no such load (default: all but 2)"
    )
    parser.add_argument("--rounds", type=int, default=None, help="(default: 3; with --tiny 1)")
    parser.add_argument("--settle", type=int, default=12, help="steps before the timed ones")
    parser.add_argument("--window", type=int, default=6, help="timed steps")
    parser.add_argument("--learning", type=int, default=64, help="steps until the plans have settled")
    parser.add_argument("--minutes", type=float, default=4.5, help="begin no round with tiers that would end after")
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
