"""A program under a memory limit of the kernel's, which ends whatever exceeds it with SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MEMORY = Path("/sys/fs/cgroup/memory")  # version 1
UNIFIED = Path("/sys/fs/cgroup")  # version 2


@dataclass(frozen=True)
class Outcome:
    """How a program ended, what it computed, what tiers said, bytes that went to disk, the peaks it counted, and
    whether the kernel left the other process alive."""

    returncode: int
    losses: list[float]
    said: list[str]
    on_disk: int
    peak_dram: int
    other_alive: bool


class Cgroup:
    """A memory cgroup with a limit and without swap, of either version, as long as the `with` block lasts."""

    def __init__(self, limit: int) -> None:
        self._version_1 = (MEMORY / "memory.limit_in_bytes").exists()
        self.path = (MEMORY if self._version_1 else UNIFIED) / f"tiers-test-{os.getpid()}-{time.monotonic_ns()}"
        self._limit = limit

    def __enter__(self) -> Cgroup:
        self.path.mkdir()
        (self.path / ("memory.limit_in_bytes" if self._version_1 else "memory.max")).write_text(str(self._limit))
        with suppress(OSError):  # a kernel that does not account for swap
            (self.path / ("memory.memsw.limit_in_bytes" if self._version_1 else "memory.swap.max")).write_text(
                str(self._limit if self._version_1 else 0)
            )
        return self

    def __exit__(self, *error: object) -> None:
        deadline = time.monotonic() + 60
        while self.path.exists() and time.monotonic() < deadline:
            for process in (self.path / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            with suppress(OSError):  # busy until its last process is gone
                self.path.rmdir()
            time.sleep(0.01)

    def highest(self) -> int:
        """The most that was ever in use, in bytes."""
        return int((self.path / ("memory.max_usage_in_bytes" if self._version_1 else "memory.peak")).read_text())


def cgroup_refusal() -> str | None:
    """Say why no cgroup can be made here, or return None."""
    try:
        with Cgroup(1 << 30):
            return None
    except OSError as error:
        return f"no cgroup can be made here: {error}"


PROGRAM = """
import json, logging, os, pathlib, subprocess, sys
options = json.loads(sys.argv[1])
if options["cgroup"]:
    (pathlib.Path(options["cgroup"]) / "cgroup.procs").write_text(str(os.getpid()))
import torch
torch.set_num_threads(1)  # others would spin while they wait, and tiers have threads of their own
from contextlib import nullcontext
import torch_tiers as tiers

OTHER = "import sys, time\\nheld, count, start = [], int(sys.argv[1]) >> 23, time.monotonic()\\n"
OTHER += "for k in range(count):\\n"
OTHER += "    held.append(b'x' * (1 << 23))\\n"
OTHER += "    time.sleep(max(0, start + float(sys.argv[2]) * (k + 1) / count - time.monotonic()))\\n"
OTHER += "time.sleep(600)"
SILENT = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
PART = 4 << 20  # floats: 16 MiB
said = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: (said.append(record.getMessage()), print(said[-1], file=sys.stderr, flush=True))
logging.getLogger("tiers").addHandler(handler)
torch.manual_seed(0)
model = torch.nn.Linear(1024, 1024, bias=False)

class Program(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = model

    def forward(self, x):
        x = self.linear(x)
        layers = options["saved"] // (4 * PART)
        for layer in range(layers):
            if layer == layers * 3 // 4:  # the tiers are full
                self.begins()
            x = x.tanh()
        return x

    def begins(self):
        global other
        if step == options["steps"] // 2 and options["others"]:
            arguments = [str(options["others"]), str(options["within"])]
            other = subprocess.Popen([sys.executable, "-c", OTHER, *arguments], **SILENT)

program, losses, other = Program(), [], None
context = tiers.session(**options["session"]) if options["session"] else nullcontext()
with context as session:
    for step in range(options["steps"]):
        loss = program(torch.ones(PART // 1024, 1024)).square().mean()
        loss.backward()
        losses.append(loss.item())
        losses.append(model.weight.grad.double().sum().item())
    alive = other is None or other.poll() is None
    stats = session.stats() if session else {"moved": {"disk_write": 0}, "peak": {"dram": 0}}
if other:
    other.kill()
print(json.dumps([losses, said, stats["moved"]["disk_write"], stats["peak"]["dram"], alive]))
"""


def run_under(
    cgroup: Cgroup | None, *, saved: int, steps: int = 4, others: int = 0, within: float | None = None, **session: str
) -> Outcome:
    """Run a program that saves `saved` bytes a step; half-way another in its cgroup begins to take `others` bytes.

    Parameters
    ----------
    within
        Seconds that the other takes for it; by default 20 MiB a second.
    session
        Arguments of a session; without any the program runs without tiers.
    """
    with tempfile.TemporaryDirectory() as directory:
        if session:
            session = {"allocator": "torch", "nvme_path": directory, "nvme_gds": "off", **session}
        options = {"saved": saved, "steps": steps, "others": others, "session": session}
        options["within"] = others / (20 << 20) if within is None else within
        options["cgroup"] = str(cgroup.path) if cgroup else ""
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(options)],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert os.listdir(directory) == []
    if done.returncode:
        return Outcome(done.returncode, [], [done.stderr], 0, 0, False)
    return Outcome(0, *json.loads(done.stdout))
