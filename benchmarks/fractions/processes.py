"""The driver's side of a worker: start it, ask it, and notice when it dies or takes too long. Needs no torch."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fractions.cells import ROOT


class Failed(Exception):
    """A method could not be measured; the text is the reason, in one line."""


class TooLong(Failed):
    """It took longer than it may."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What all workers of a run have in common."""

    tiny: bool = False
    dram: str = "64GiB"
    trl: Path | None = None
    runs: Path | None = None
    lengths: tuple[tuple[str, Any], ...] = ()

    def words(self) -> list[str]:
        """The worker's arguments."""
        words = ["--dram", self.dram, "--lengths", json.dumps(dict(self.lengths))]
        words += ["--tiny"] if self.tiny else []
        words += ["--runs", str(self.runs)] if self.runs else []
        return words + (["--trl", str(self.trl)] if self.trl else [])


class Worker:
    """A process that measures methods on one workload."""

    def __init__(self, workload: str, setting: Setting, batch: int | None = None) -> None:
        words = [workload, *setting.words()] + (["--batch", str(batch)] if batch else [])
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TIERS_ALLOCATOR")}
        environment |= {
            # The session is started in code, so that what it learned can be asked for.
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            # For every method alike, ours included: what they reserve is compared.
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }
        environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)
        # One of its own: what drivers on other GPUs of this node hold of DRAM is none of this measurement's.
        self._ledger = tempfile.TemporaryDirectory(prefix="tiers-ledger-")
        environment["TIERS_LEDGER"] = self._ledger.name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fractions", "worker", *words],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self._read = b""
        self.usable = True

    def ask(self, method: str, hbm: int | None, timeout: float) -> dict[str, Any]:
        """Have a method measured.

        Raises
        ------
        Failed
            With the worker's reason, or with that of its death.
        TooLong
            After `timeout` seconds.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"method": method, "hbm": hbm}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        answer: dict[str, Any] = json.loads(self._line(timeout))
        if answer.pop("again"):
            self.close()
        if "failed" in answer:
            raise Failed(answer["failed"])
        return answer

    def _line(self, timeout: float) -> bytes:
        assert self._process.stdout is not None
        until = time.monotonic() + timeout
        while b"\n" not in self._read:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                self.kill()
                raise TooLong(f"took more than {timeout:.0f} s")
            read = os.read(self._process.stdout.fileno(), 1 << 16)
            if not read:
                raise self._died()
            self._read += read
        line, _, self._read = self._read.partition(b"\n")
        return line

    def _died(self) -> Failed:
        self.usable = False
        code = self._process.wait()
        self._errors.seek(0)
        said = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
        return Failed(f"the process ended with {how}" + (f": {said[-1][:300]}" if said else ""))

    def kill(self) -> None:
        """End it, and what it started, at once."""
        self.usable = False
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._ledger.cleanup()

    def close(self, timeout: float = 5.0) -> None:
        """Let it end; idempotent."""
        self.usable = False
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()
        self._ledger.cleanup()
