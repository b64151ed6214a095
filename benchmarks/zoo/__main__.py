"""Run programs of the zoo plainly, with tiers at budgets and with their own checkpointing, and print a table.

``python -m benchmarks.zoo --out DIR --gpus 8 --programs gpt unet --budgets 75 60 45 --steps 60 --limit 1500``. Each run
is a process. What `DIR` holds already is not run again, unless it failed and ``--retry`` is given. With ``--alone``
plain and tiers take turns on the first GPU, for a figure to be claimed: 12 rounds of 14 steps, once plans have settled.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.zoo.program import PROGRAMS, SIZES, has_own, lacking, ranks
from benchmarks.zoo.results import AGAIN, IN_TURNS, OK, OWN, PLAIN, Record, apart, in_turns, latest, read, table
from benchmarks.zoo.run import DETERMINISTIC, UNAVAILABLE

RUNNING: set[subprocess.Popen[str]] = set()
ENDS = 40.0  # seconds that a program has after SIGTERM, to write what it learned; torchrun waits 30 for its ranks
STATE = 0.3  # of what plain reserves: with more of it, a budget is of what is left to activations
ROUNDS, TURN = 12, 14  # of plain and tiers in turns


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run has its GPUs, none for the CPU, and its cores."""

    gpus: tuple[str, ...]
    cores: tuple[int, ...]

    def __add__(self, other: Place) -> Place:
        return Place(self.gpus + other.gpus, self.cores + other.cores)


@dataclass
class Driver:
    """Runs what is missing.

    Attributes
    ----------
    out
        Folder of results, logs and the run directories of tiers.
    timeout
        Seconds that a run may take.
    until
        When no run may begin any more, by `time.monotonic`.
    """

    out: Path
    size: str
    steps: int
    budgets: list[int]
    timeout: float
    until: float
    retry: bool = False
    deterministic: str | None = None
    found: dict[tuple[str, str], Record] = field(default_factory=dict)
    _told: set[subprocess.Popen[str]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        self.found = latest(read(self.results), self.size, self.steps)

    @property
    def results(self) -> Path:
        """The file of results."""
        return self.out / "results.jsonl"

    def run(self, programs: list[str], places: list[Place]) -> None:
        """Run programs, those of one place one after the other; some are of two places together, which begins first."""
        pairs: queue.SimpleQueue[str] = queue.SimpleQueue()
        singles: queue.SimpleQueue[str] = queue.SimpleQueue()
        for program in programs:
            (singles if ranks(program) == 1 else pairs).put(program)
        wide = min(pairs.qsize(), len(places) // 2)
        if pairs.qsize() and not wide and places[0].gpus:
            print("programs on two GPUs are left out", file=sys.stderr, flush=True)
            pairs = queue.SimpleQueue()
        threads = [
            threading.Thread(target=self._pair, args=(pairs, singles, places[2 * k], places[2 * k + 1]))
            for k in range(wide)
        ]
        mine = [singles] if wide else [pairs, singles]
        threads += [threading.Thread(target=self._serve, args=(mine, place)) for place in places[2 * wide :]]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                time.sleep(0.2)  # a join that is interrupted takes its thread to be over
        except KeyboardInterrupt:
            while any(thread.is_alive() for thread in threads):
                self.stop()  # also what was about to begin
                time.sleep(0.2)
            raise

    def stop(self) -> None:
        """End what runs, of which nothing is kept, and begin nothing any more."""
        self.until = -math.inf
        for process in RUNNING.copy() - self._told:
            self._told.add(process)
            end(process, signal.SIGTERM)

    def _pair(self, pairs: queue.SimpleQueue[str], singles: queue.SimpleQueue[str], one: Place, other: Place) -> None:
        self._serve([pairs], one + other)
        beside = threading.Thread(target=self._serve, args=([singles], other))
        beside.start()
        self._serve([singles], one)
        beside.join()

    def _serve(self, queues: list[queue.SimpleQueue[str]], place: Place) -> None:
        os.sched_setaffinity(0, place.cores)  # of this thread, and so of the processes that it starts
        for waiting in queues:
            with suppress(queue.Empty):
                while True:
                    self._program(waiting.get_nowait(), place)

    def _program(self, program: str, place: Place) -> None:
        """Run all variants of a program, of which budgets are known once it has run plainly."""
        why = lacking(program)
        if why is not None:
            if (program, PLAIN) not in self.found:
                self._keep({"program": program, "variant": PLAIN, "status": "unavailable", "error": why})
            return
        reports: list[threading.Thread] = []  # whose runs are over: the GPU need not wait for those
        for variant in (PLAIN, *map(str, self.budgets), OWN, AGAIN):
            if variant == AGAIN:
                for report in reports:
                    report.join()
            wanted = {AGAIN: self._differs, OWN: has_own}.get(variant, bool)(program)
            if not wanted or not self._is_due(program, variant):
                continue
            record = self._variant(program, variant, self.budget(program, variant), place)
            if record["status"] == OK and "budget" in record:
                reports.append(threading.Thread(target=self._account, args=(record, place)))
                reports[-1].start()
            else:
                self._keep(record)

    def _account(self, record: dict[str, Any], place: Place) -> None:
        name = self._name(record["program"], record["variant"])
        self._keep(record | account(self.out / "runs" / name, self._environ(place), self._log(name), self.steps))

    def in_turns(self, programs: list[str], place: Place) -> None:
        """Have plain and tiers take turns, program by program and budget by budget."""
        os.sched_setaffinity(0, place.cores)
        for program in programs:
            if ranks(program) > 1 or lacking(program) is not None:
                print(f"{program} is left out: {lacking(program) or 'it has several ranks'}", file=sys.stderr)
                continue
            if self._is_due(program, PLAIN):
                self._keep(self._variant(program, PLAIN, None, place))
            for percent in map(str, self.budgets):
                budget = self.budget(program, percent)
                if budget is not None and self._is_due(program, percent + IN_TURNS):
                    self._keep(self._turns(program, percent + IN_TURNS, budget, place))

    def _is_due(self, program: str, variant: str) -> bool:
        """Whether a variant has to be run, and can."""
        before, plain = self.found.get((program, variant)), self.found.get((program, PLAIN))
        if before is not None and (before["status"] == OK or not self.retry):
            return False
        known = variant == PLAIN or (plain is not None and plain["status"] == OK)
        return known and time.monotonic() <= self.until

    def _differs(self, program: str) -> bool:
        """Whether a run with tiers had other losses than the plain one, which may then not equal itself."""
        plain = self.found.get((program, PLAIN))
        ours = [self.found.get((program, str(budget))) for budget in self.budgets]
        done = [run for run in ours if run is not None and run["status"] == OK]
        return plain is not None and any(apart(plain["losses"], run["losses"]) is not None for run in done)

    def budget(self, program: str, variant: str) -> int | None:
        """Bytes of HBM for a variant that is a percentage: of plain's, or of its activations where much is state."""
        plain = self.found.get((program, PLAIN))
        if plain is None or plain["status"] != OK or not variant.isdigit():
            return None
        state = plain["state"] if STATE * plain["reserved"] < plain["state"] < plain["reserved"] else 0
        return int(state + (plain["reserved"] - state) * int(variant) / 100)

    def _keep(self, record: dict[str, Any]) -> None:
        if self.until == -math.inf:
            return  # it did not fail, but was ended
        record |= {"size": self.size, "steps": self.steps}
        with self._lock:
            self.found[record["program"], record["variant"]] = record
            with self.results.open("a") as file:
                file.write(json.dumps(record) + "\n")
            told = f"{record['ms']:.1f} ms" if record["status"] == OK else record["error"]
            print(f"{record['program']} {record['variant']}: {record['status']}, {told}", file=sys.stderr, flush=True)

    def _variant(self, program: str, variant: str, budget: int | None, place: Place) -> dict[str, Any]:
        environ = self._environ(place)
        name = self._name(program, variant)
        record: dict[str, Any] = {"program": program, "variant": variant}
        if budget is not None:
            record["budget"] = budget
            environ["TIERS_PLAN_CACHE"] = "0"  # what it takes to learn is a part of it
            environ |= {name: value for name, value in os.environ.items() if name.startswith("TIERS_")}
            environ |= {"TIERS_RUN": str((self.out / "runs" / name).resolve()), "TIERS_RUN_FORCE": "1"}
            # A CPU's memory has no budget: there everything moves, to see that programs bear it.
            ours = {"TIERS_ALLOCATOR": "pages", "TIERS_HBM": str(budget)}
            environ |= ours if place.gpus else {"TIERS_ALLOCATOR": "torch", "TIERS_POLICY": "move"}
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks(program)}"]
        command = [sys.executable, *(launcher if ranks(program) > 1 else []), "-m", "benchmarks.zoo.run", program]
        command += ["--size", self.size, "--steps", str(self.steps)]
        if self.deterministic is not None:
            command += ["--deterministic", self.deterministic]
        command += ["--checkpoint"] * (variant == OWN)
        log = self._log(name)
        began = time.monotonic()
        code, printed = call(command, environ, log, self.timeout)
        record["wall_s"] = round(time.monotonic() - began, 1)
        if code == 0 and printed.strip():
            record |= json.loads(printed.splitlines()[-1])
            return record | {"status": OK, "error": ""}
        return record | failure(code, log)

    def _turns(self, program: str, variant: str, budget: int, place: Place) -> dict[str, Any]:
        environ = self._environ(place)
        record: dict[str, Any] = {"program": program, "variant": variant, "budget": budget}
        log = self._log(self._name(program, variant))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.json"
            command = [sys.executable, "-m", "benchmarks.allocators", "--workload", f"zoo.{program}"]
            command += ["--variants", "plain,pages:auto", "--hbm", str(budget), "--json", str(file)]
            command += ["--rounds", str(ROUNDS), "--turn", str(TURN)]
            code, _ = call(command, environ, log, max(self.timeout, 600.0))
            if code != 0 or not file.exists():
                return record | failure(code, log)
            plain, ours = json.loads(file.read_text())
        times = {"ms": statistics.median(ours["steps"]) * 1e3, "plain_ms": statistics.median(plain["steps"]) * 1e3}
        return record | times | {"ratio": ours["ratio"], "status": OK, "error": ""}

    def _environ(self, place: Place) -> dict[str, str]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("TIERS_")}
        environ["OMP_NUM_THREADS"] = str(max(1, len(place.cores) // 2))
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(place.gpus)
        return environ

    def _name(self, program: str, variant: str) -> str:
        return f"{program}-{self.size}-{self.steps}-{variant.replace(' ', '-')}"

    def _log(self, name: str) -> Path:
        log = self.out / "logs" / f"{name}.txt"
        log.parent.mkdir(exist_ok=True)
        return log


def failure(code: int | None, log: Path) -> dict[str, Any]:
    """How a run ended that did not do what it should have, with the exception, or the last that it said."""
    status = {None: "too long", UNAVAILABLE: "unavailable"}.get(code, "failed")
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    raised = [line for line in said if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception|OutOfMemory\w*)\b", line)]
    return {"status": status, "error": (raised or said or [f"exit code {code}"])[-1][:300]}


def call(command: list[str], environ: dict[str, str], log: Path, timeout: float) -> tuple[int | None, str]:
    """Run a command with its errors in a file; its exit code, None if it took too long, and what it printed."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        RUNNING.add(process)
        try:
            printed, _ = process.communicate(timeout=timeout)
            return process.returncode, printed
        except subprocess.TimeoutExpired:
            for how in (signal.SIGTERM, signal.SIGKILL):
                end(process, how)
                with suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=ENDS)
                    break
            return None, ""
        finally:
            RUNNING.discard(process)


def end(process: subprocess.Popen[str], how: signal.Signals) -> None:
    """Send a signal to a process and what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, how)


def account(directory: Path, environ: dict[str, str], log: Path, steps: int) -> dict[str, Any]:
    """What a run with tiers left behind: peak of HBM, bytes moved, a step as predicted, and without any move.

    The peak is of HBM alone, while PyTorch's statistics count what tiers put into DRAM, too. Of several ranks it is the
    most that any had, and the rest is of the first.
    """
    told: dict[str, Any] = {}
    for part in sorted(directory.glob("rank*")) or [directory]:
        command = [sys.executable, "-m", "torch_tiers", "report", str(part), "--json"]
        code, printed = call(command, environ, log.with_suffix(".report.txt"), 60)
        if code != 0:
            continue
        stats = json.loads(printed)
        if stats["peak"].get("hbm"):
            told["reserved"] = max(stats["peak"]["hbm"], told.get("reserved", 0))
        if "moved" in told:
            continue
        told |= {"moved": stats["moved"], "iterations": stats["iterations"]}
        told["settled"] = stats["step_s"]["settled"]["steps"] // max(1, round(stats["steps"] / steps))
        each = max(1, round(stats["iterations"] / steps)) * 1e3  # of predictions, which are of an iteration, in ms
        for name in ("predicted", "ideal"):
            seconds = stats.get("why", {}).get(f"{name}_s")
            if seconds:
                told[f"{name}_ms"] = seconds * each
    return told


def main() -> None:
    """Run what the command line asks for, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=1, help="0: the CPU")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="PROGRAM")
    parser.add_argument("--budgets", nargs="*", type=int, default=[75, 60, 45], help="percent of what plain reserves")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no run begins")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds that one run may take")
    parser.add_argument("--retry", action="store_true", help="run again what failed")
    parser.add_argument("--alone", action="store_true", help="plain and tiers in turns, a program at a time")
    parser.add_argument(
        "--deterministic",
        **DETERMINISTIC,
        help="of PyTorch's kernels only deterministic ones, at least where there are any; take another DIR for it",
    )
    options = parser.parse_args()
    until = time.monotonic() + options.limit
    how = (options.size, options.steps, options.budgets, options.timeout, until, options.retry, options.deterministic)
    driver = Driver(options.out, *how)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(k) for k in range(options.gpus)]
    places = shared_out(names[: options.gpus], sorted(os.sched_getaffinity(0)))
    if options.alone and not options.gpus:
        parser.error("--alone takes a GPU")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.alone:
            driver.in_turns(options.programs, places[0])
        else:
            driver.run(options.programs, places)
    except KeyboardInterrupt:
        driver.stop()
        print("interrupted; the same command goes on from here", file=sys.stderr)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(table(driver.found, options.budgets))
    print(in_turns(driver.found), end="")


def shared_out(gpus: list[str], cores: list[int]) -> list[Place]:
    """Places of a GPU each, or one without, that share the cores evenly."""
    share = max(1, len(cores) // max(len(gpus), 1))
    parts = [tuple(cores[k * share : (k + 1) * share] or cores) for k in range(max(len(gpus), 1))]
    return [Place((gpu,), part) for gpu, part in zip(gpus, parts, strict=False)] or [Place((), parts[0])]


if __name__ == "__main__":
    main()
