"""Run programs of the zoo plainly, with their own checkpointing and with tiers at budgets, and print a table.

``python -m benchmarks.zoo --out DIR --gpus 8 --programs gpt unet --budgets 75 60 45 --steps 60 --limit 1500``. Each run
is a process. What `DIR` holds already is not run again, unless it failed and ``--retry`` is given.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.zoo.program import PROGRAMS, SIZES
from benchmarks.zoo.results import AGAIN, OK, OWN, PLAIN, Record, latest, read, table
from benchmarks.zoo.run import UNAVAILABLE

ENDS = 20.0  # seconds that a program has after SIGTERM, to write what it learned


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
    deterministic: bool = False
    found: dict[tuple[str, str], Record] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        self.found = latest(read(self.results), self.size, self.steps)

    @property
    def results(self) -> Path:
        """The file of results."""
        return self.out / "results.jsonl"

    def run(self, programs: list[str], gpus: list[str | None]) -> None:
        """Run programs, those of one GPU one after the other; None is no GPU."""
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for program in programs:
            waiting.put(program)
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // len(gpus))
        threads = [
            threading.Thread(target=self._serve, args=(waiting, gpu, cores[k * share : (k + 1) * share] or cores))
            for k, gpu in enumerate(gpus)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            self.until = 0  # what runs may end
            raise

    def _serve(self, waiting: queue.SimpleQueue[str], gpu: str | None, cores: list[int]) -> None:
        os.sched_setaffinity(0, cores)  # of this thread, and so of the processes that it starts
        while True:
            try:
                program = waiting.get_nowait()
            except queue.Empty:
                return
            self._program(program, gpu, len(cores))

    def _program(self, program: str, gpu: str | None, cores: int) -> None:
        """Run all variants of a program, of which budgets are known once it has run plainly."""
        for variant in (PLAIN, OWN, *map(str, self.budgets), AGAIN):
            before = self.found.get((program, variant))
            if before is not None and (before["status"] == OK or not self.retry):
                continue
            plain = self.found.get((program, PLAIN))
            if variant != PLAIN and (plain is None or plain["status"] != OK):
                return
            if time.monotonic() > self.until:
                return
            budget = int(plain["reserved"] * int(variant) / 100) if plain and variant.isdigit() else None
            record = self._variant(program, variant, budget, gpu, cores)
            with self._lock:
                self.found[program, variant] = record
                with self.results.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                told = f"{record['ms']:.1f} ms" if record["status"] == OK else record["error"]
                print(f"{program} {variant}: {record['status']}, {told}", file=sys.stderr, flush=True)

    def _variant(self, program: str, variant: str, budget: int | None, gpu: str | None, cores: int) -> dict[str, Any]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("TIERS_")}
        environ["OMP_NUM_THREADS"] = str(max(1, cores // 2))
        environ["CUDA_VISIBLE_DEVICES"] = "" if gpu is None else gpu
        directory = self.out / "runs" / f"{program}-{self.size}-{self.steps}-{variant}"
        if budget is not None:
            environ |= {name: value for name, value in os.environ.items() if name.startswith("TIERS_")}
            environ |= {"TIERS_RUN": str(directory.resolve()), "TIERS_RUN_FORCE": "1"}
            # A CPU's memory has no budget: there everything moves, to see that programs bear it.
            ours = {"TIERS_ALLOCATOR": "pages", "TIERS_HBM": str(budget)}
            environ |= {"TIERS_ALLOCATOR": "torch", "TIERS_POLICY": "move"} if gpu is None else ours
        command = [sys.executable, "-m", "benchmarks.zoo.run", program, "--size", self.size, "--steps", str(self.steps)]
        command += ["--deterministic"] * self.deterministic + ["--checkpoint"] * (variant == OWN)
        record: dict[str, Any] = {"program": program, "variant": variant, "size": self.size, "steps": self.steps}
        if budget is not None:
            record["budget"] = budget
        log = self.out / "logs" / f"{directory.name}.txt"
        log.parent.mkdir(exist_ok=True)
        began = time.monotonic()
        code, printed = call(command, environ, log, self.timeout)
        record["wall_s"] = round(time.monotonic() - began, 1)
        if code == 0 and printed.strip():
            record |= json.loads(printed.splitlines()[-1]) | {"status": OK, "error": ""}
            if budget is not None:
                record |= account(directory, environ, log)
            return record
        status = {None: "too long", UNAVAILABLE: "unavailable"}.get(code, "failed")
        said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return record | {"status": status, "error": said[-1][:300] if said else f"exit code {code}"}


def call(command: list[str], environ: dict[str, str], log: Path, timeout: float) -> tuple[int | None, str]:
    """Run a command with its errors in a file; its exit code, None if it took too long, and what it printed."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        try:
            printed, _ = process.communicate(timeout=timeout)
            return process.returncode, printed
        except subprocess.TimeoutExpired:
            for how in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, how)
                with suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=ENDS)
                    break
            return None, ""


def account(directory: Path, environ: dict[str, str], log: Path) -> dict[str, Any]:
    """What a run with tiers left behind: peak of HBM, bytes moved, and the period as predicted and as measured.

    The peak is of HBM alone, while PyTorch's statistics count what tiers put into DRAM, too.
    """
    command = [sys.executable, "-m", "torch_tiers", "report", str(directory), "--json"]
    environ = {
        name: value for name, value in environ.items() if name not in ("TIERS_ALLOCATOR", "TIERS_RUN", "TIERS_HBM")
    }
    code, printed = call(command, environ, log.with_suffix(".report.txt"), 60)
    if code != 0:
        return {}
    stats = json.loads(printed)
    told: dict[str, Any] = {"reserved": stats["peak"]["hbm"]} if stats["peak"].get("hbm") else {}
    told |= {"moved": stats["moved"], "periods": stats["periods"]}
    if "why" in stats:
        told |= {name: stats["why"][name] for name in ("predicted_s", "measured_s", "ideal_s")}
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
    parser.add_argument(
        "--deterministic", action="store_true", help="with PyTorch's deterministic kernels; take another DIR for it"
    )
    options = parser.parse_args()
    until = time.monotonic() + options.limit
    how = (options.size, options.steps, options.budgets, options.timeout, until, options.retry, options.deterministic)
    driver = Driver(options.out, *how)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(k) for k in range(options.gpus)]
    driver.run(options.programs, list(names[: options.gpus]) or [None])
    print(table(driver.found, options.budgets))


if __name__ == "__main__":
    main()
