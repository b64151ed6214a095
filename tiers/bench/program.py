"""One run of a program: a process of its own, what it left behind, and how it ended."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from types import FrameType
from typing import Any

from torch_tiers.bench import watch
from torch_tiers.bench.losses import printed
from torch_tiers.run_directory import STATS, by_iteration

GRACE = 30.0  # seconds from the request to end until a program is killed: it may be writing a checkpoint
OUTPUT = "output.txt"
STRETCHES = 5
_RAISED = re.compile(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception|OutOfMemory\w*|ConfigError)\b")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one run.

    Attributes
    ----------
    reason : str
        Why it says nothing of the step; empty if it does.
    step : float or None
        Seconds of a step, of the slowest rank; see `step_of`.
    steps : int
        How many there were.
    memory : int or None
        The most bytes of HBM that a rank had; None where nothing tells.
    budget : int or None
        Its budget in bytes, under tiers.
    moved : int or None
        Bytes that an iteration moved both ways, under tiers.
    settled : bool
        Whether all steps that count were under the last plan.
    losses : list of float
        Those that it printed.
    device, torch : str
        What it trained on: the GPU's name or `cpu`; and PyTorch's version.
    compiles : bool
        Whether it compiled anything.
    tried : bool
        Whether it was run at all.
    """

    reason: str
    step: float | None = None
    steps: int = 0
    memory: int | None = None
    budget: int | None = None
    moved: int | None = None
    settled: bool = True
    losses: list[float] = field(default_factory=list)
    device: str = ""
    compiles: bool = False
    torch: str = ""
    tried: bool = True

    @property
    def cuda(self) -> bool:
        """Whether it trained on a GPU."""
        return self.device not in ("", "cpu")

    @property
    def does_not_fit(self) -> bool:
        """Whether it ran out of GPU memory."""
        return "OutOfMemory" in self.reason

    def to_json(self) -> dict[str, Any]:
        """As an object that `Outcome(**it)` reads back."""
        return asdict(self)


def run(
    command: Sequence[str], environ: Mapping[str, str], directory: Path, pattern: str, seconds: float | None = None
) -> Outcome:
    """Run the program once.

    Parameters
    ----------
    environ
        Its environment, but for what has it leave something in `directory`.
    directory
        For its run directory and `output.txt`; made, and may not be there yet.
    pattern
        Finds the losses in what it prints; see `losses.printed`.
    seconds
        Time after which it is interrupted, as by Ctrl-C.

    Raises
    ------
    OSError
        If it cannot be started.
    """
    directory.mkdir(parents=True)
    environ = {**environ, watch.WATCH: str(directory.absolute())}
    if environ.get("TIERS_ALLOCATOR"):
        environ["TIERS_RUN"] = str(directory.absolute())
    code, ended = call(command, environ, directory / OUTPUT, seconds)
    said = (directory / OUTPUT).read_text(errors="replace")
    watched = [json.loads(file.read_text()) for file in sorted(directory.glob(f"{watch.FILE}-*.json"))]
    reason = ""
    if code != 0 and not ended:
        reason = f"ended with code {code}: {reason_of(said)}".removesuffix(": ")
    elif not any(one["step_s"] for one in watched):
        said_last = f"; its last line: {last_line(said)}" if last_line(said) else ""
        reason = f"took no two steps of an optimizer that torch-tiers could see{said_last}"
    if reason:
        return Outcome(reason)
    return Outcome("", **_measured(watched, directory), losses=printed(said, pattern))


def call(command: Sequence[str], environ: Mapping[str, str], output: Path, seconds: float | None) -> tuple[int, bool]:
    """Run a command with all that it prints in a file; its exit code, and whether its time was over."""
    with open(output, "wb") as file:
        # In a group of its own: what launches ranks passes the request to end on, or leaves them to us.
        with _interruptible():
            child = subprocess.Popen(
                command, env=dict(environ), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        ended = False
        try:
            try:
                child.wait(seconds)
            except subprocess.TimeoutExpired:
                ended = True
                _signal(child, signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(GRACE)
        finally:
            _signal(child, signal.SIGKILL)  # also workers that a launcher has left behind
            child.wait()
    return child.returncode, ended


def _measured(watched: Sequence[Mapping[str, Any]], directory: Path) -> dict[str, Any]:
    """What the ranks saw, and under tiers what they counted."""
    trained = [one for one in watched if one["step_s"]]
    first = min(trained, key=lambda one: (one["rank"], -one["steps"]))
    told: dict[str, Any] = {
        "step": max(step_of(one["step_s"]) for one in trained),
        "steps": first["steps"],
        "memory": max(one["reserved"] for one in trained) or None,
        "device": first["device"],
        "compiles": first["compiles"],
        "torch": first["torch"],
    }
    counted = _stats(directory)
    if not counted:
        return told
    each, _ = by_iteration(counted[0])
    settled = counted[0]["step_s"].get("settled", {"steps": 0})["steps"]
    return told | {
        "memory": max(stats["peak"]["hbm"] for stats in counted),
        "budget": counted[0]["budget"]["hbm"],
        "moved": int(each["d2h"] + each["h2d"]),
        "settled": settled >= len(first["step_s"]) // 2,
    }


def step_of(times: Sequence[float]) -> float:
    """Seconds of a step: of the second half of `times` the mean of stretches, in the median of these.

    A mean, as two optimizers may take turns in a step; of stretches, as others use the host, too.
    """
    later = times[len(times) // 2 :]
    count = min(STRETCHES, len(later))
    ends = [round(k * len(later) / count) for k in range(count + 1)]
    return median(fmean(later[begin:end]) for begin, end in pairwise(ends))


def reason_of(said: str) -> str:
    """The exception that ended a program, by what it said, or else the last that it said."""
    raised = [line.strip() for line in said.splitlines() if _RAISED.match(line)]
    return (raised[-1] if raised else last_line(said))[:300]


@contextmanager
def _interruptible() -> Iterator[None]:
    """Who is started here can be interrupted, also where this process is not to be: behind a shell's ``&``."""
    here = threading.current_thread() is threading.main_thread()  # elsewhere nobody may change a signal's handler
    ignored = here and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end what is inside with SystemExit, so that no program and no directory is left behind.

    By default they end this process alone: the program, in a group of its own, would go on with the GPU. What is
    ignored, as SIGHUP under ``nohup``, stays so.
    """
    here = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGHUP) if here else ()
    before = {number: signal.getsignal(number) for number in numbers}

    def end(number: int, frame: FrameType | None) -> None:
        for taken in ours:  # the second one must not break off what the first has us clear away
            signal.signal(taken, signal.SIG_IGN)
        raise SystemExit(128 + number)  # as shells tell

    ours = [number for number, handler in before.items() if handler is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])


def _signal(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # nobody is left
        os.killpg(child.pid, number)


def _stats(directory: Path) -> list[dict[str, Any]]:
    """What each rank counted, the first one first."""
    found = sorted(directory.glob(f"rank*/{STATS}"), key=lambda path: (len(path.parent.name), path.parent.name))
    counted = []
    for file in (directory / STATS, *found):
        with suppress(FileNotFoundError, ValueError):
            counted.append(json.loads(file.read_text()))
    return counted


def last_line(said: str) -> str:
    """The last line that says something."""
    return next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
