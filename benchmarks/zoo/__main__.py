"""Run programs of the zoo through `tiers bench`: plainly, at budgets, and with their own checkpointing; print a table.

``python -m benchmarks.zoo --out DIR --gpus 8 --programs gpt unet --budgets 75 60 45 --steps 60 --limit 1500``. Each
program is a `tiers bench` on a GPU of its own, or on two, and its runs are in ``DIR/runs``; the same command goes on
from there. For a figure to be claimed: ``--gpus 1 --rounds 3``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.zoo import predicted
from benchmarks.zoo.program import PROGRAMS, SIZES, has_own, lacking, ranks
from benchmarks.zoo.results import OWN, Record, read, table, write
from benchmarks.zoo.run import DETERMINISTIC


@dataclass(frozen=True, slots=True)
class Place:
    """Where a program has its GPUs, none for the CPU, and its cores."""

    gpus: tuple[str, ...]
    cores: tuple[int, ...]

    def __add__(self, other: Place) -> Place:
        return Place(self.gpus + other.gpus, self.cores + other.cores)


@dataclass
class Driver:
    """Benches programs, side by side where there are several GPUs.

    Attributes
    ----------
    out
        Folder of results and of the runs.
    words
        Of every run of `benchmarks.zoo.run`.
    options
        Of every `tiers bench`.
    own
        Whether programs also run with their own activation checkpointing. Such runs have no budget.
    until
        When no program may begin any more, by `time.monotonic`.
    """

    out: Path
    words: list[str]
    options: list[str]
    own: bool
    until: float
    found: dict[str, Record] = field(default_factory=dict)
    _running: set[subprocess.Popen[str]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        self.found = read(self.results)

    @property
    def results(self) -> Path:
        """The file of results."""
        return self.out / "results.json"

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
            self.until = -math.inf
            for process in self._running.copy():
                process.terminate()  # it ends its program, and keeps what is over
            for thread in threads:
                thread.join()
            raise

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
                while time.monotonic() <= self.until:
                    program = waiting.get_nowait()
                    self._keep(
                        program, {"error": lacking(program)} if lacking(program) else self._bench(program, place)
                    )

    def _bench(self, program: str, place: Place) -> dict[str, Any]:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks(program)}"]
        command = [sys.executable, *(launcher if ranks(program) > 1 else [])]
        command += ["-m", "benchmarks.zoo.run", program, *self.words]
        runs = self.out / "runs" / program
        bench = [sys.executable, "-m", "torch_tiers", "bench", "--json", "--out", str(runs), *self.options]
        if self.own and has_own(program):
            bench += ["--variant", f"{OWN}={shlex.join([*command, '--checkpoint'])}"]
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": str(max(1, len(place.cores) // 2)),
            "CUDA_VISIBLE_DEVICES": ",".join(place.gpus),
        }
        if not place.gpus:
            environ["TIERS_ALLOCATOR"] = "torch"
        process = subprocess.Popen(
            [*bench, "--", *command], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._running.add(process)
        try:
            printed, errors = process.communicate()
        finally:
            self._running.discard(process)
        if not printed:
            return {"error": (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]}
        said = about(runs)
        if said is None:
            return {"error": "the plain program did not end: raise --timeout"}
        rows = {row["variant"]: row for row in json.loads(printed)}
        ours = {name: runs / f"0-{name.replace(' ', '-')}" for name in rows if name.startswith("tiers ")}
        told = {name: one for name, run in ours.items() if (one := predicted.of_run(run)) is not None}
        return {"error": "", "rows": rows, "predicted": told, **said}

    def _keep(self, program: str, record: dict[str, Any]) -> None:
        if self.until == -math.inf:
            return  # it did not fail, but was ended
        with self._lock:
            self.found[program] = record | {"day": f"{datetime.now(UTC):%m-%d}"}
            write(self.results, self.found)
            told = record["error"] or f"{1e3 * record['rows']['plain']['step']['median']:.1f} ms"
            print(f"{program}: {told}", file=sys.stderr, flush=True)


def about(runs: Path) -> dict[str, Any] | None:
    """What the plain program's first run said of itself and of the machine; None if it did not end."""
    try:
        lines = (runs / "0-plain/output.txt").read_text(errors="replace").splitlines()
        said = json.loads(next(line for line in reversed(lines) if line.startswith('{"program"')))
        return {name: said[name] for name in ("state", "device", "torch", "clock", "host_us")}
    except (OSError, StopIteration, ValueError, LookupError):  # it was ended, perhaps as it wrote
        return None


def main() -> None:
    """Run what the command line asks for, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=1, help="0: the CPU")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="PROGRAM")
    parser.add_argument("--budgets", nargs="*", type=int, default=[75, 60, 45], help="percent of what plain reserves")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--rounds", type=int, default=1, help="in which plain, budgets and checkpointing take turns")
    parser.add_argument("--peers", metavar="NAMES", help="also these of `tiers bench`: save_on_cpu,static split")
    parser.add_argument(
        "--own",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with the programs' own checkpointing; without it, results of it in DIR are dropped",
    )
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no program begins")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds that one run may take")
    parser.add_argument("--retry", action="store_true", help="run again what failed")
    parser.add_argument(
        "--deterministic",
        **DETERMINISTIC,
        help="of PyTorch's kernels only deterministic ones, at least where there are any; take another DIR for it",
    )
    options = parser.parse_args()
    words = ["--size", options.size, "--steps", str(options.steps)]
    words += ["--deterministic", options.deterministic] if options.deterministic else []
    # A CPU's memory has no budget: there everything moves, to see that programs bear it.
    bench = (
        ["--hbm", ",".join(f"{b}%" for b in options.budgets)] if options.gpus else ["--hbm", "1TiB", "--policy", "move"]
    )
    bench += ["--rounds", str(options.rounds), "--seconds", str(options.timeout), *["--retry"] * options.retry]
    bench += ["--peers", options.peers] if options.peers else []
    driver = Driver(options.out, words, bench, options.own, time.monotonic() + options.limit)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(k) for k in range(options.gpus)]
    places = shared_out(names[: options.gpus], sorted(os.sched_getaffinity(0)))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        driver.run(options.programs, places)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(table(driver.found))


def shared_out(gpus: list[str], cores: list[int]) -> list[Place]:
    """Places of a GPU each, or one without, that share the cores evenly."""
    share = max(1, len(cores) // max(len(gpus), 1))
    parts = [tuple(cores[k * share : (k + 1) * share] or cores) for k in range(max(len(gpus), 1))]
    return [Place((gpu,), part) for gpu, part in zip(gpus, parts, strict=False)] or [Place((), parts[0])]


if __name__ == "__main__":
    main()
