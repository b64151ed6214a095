"""One program at several budgets and under several policies, a process each, one after the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch_tiers.run_directory import STATS, step_seconds

GRACE = 30.0  # seconds from the request to end until a program is killed: it may be writing a checkpoint


@dataclass(frozen=True, slots=True)
class Variant:
    """How the program runs.

    Attributes
    ----------
    policy : str
        A name that `TIERS_POLICY` takes.
    hbm : str or None
        Its budget, as `TIERS_HBM` takes it; None is all that is free.
    """

    policy: str
    hbm: str | None

    @property
    def environ(self) -> dict[str, str]:
        """Variables to set."""
        return {"TIERS_POLICY": self.policy, "TIERS_HBM": self.hbm or "all"}

    def __str__(self) -> str:
        return f"{self.policy} at {self.hbm or 'all of hbm'}"


IDEAL = Variant("keep", None)
"""Everything stays, in all the HBM there is: what the others are measured against."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one run.

    Attributes
    ----------
    code : int
        Exit code; negative is the number of the signal that ended it.
    ended : bool
        Its time was over.
    stats : dict or None
        What it wrote into stats.json; of the first rank, where there are several.
    last_words : str
        The last line that it printed.
    """

    variant: Variant
    code: int
    ended: bool
    stats: dict[str, Any] | None
    last_words: str

    @property
    def failed(self) -> bool:
        """Whether it says nothing of the step: it broke off, or never stepped."""
        return (self.code != 0 and not self.ended) or self.step is None

    @property
    def step(self) -> float | None:
        """Seconds of a step, in the median of those under the last plan."""
        return None if self.stats is None else step_seconds(self.stats)


def run(
    variant: Variant,
    command: Sequence[str],
    environ: Mapping[str, str],
    directory: Path,
    seconds: float | None = None,
) -> Outcome:
    """Run the program once.

    Parameters
    ----------
    environ
        What it finds in its environment besides the variant's.
    directory
        For its run directory and `output.txt`; made, and may not be there yet.
    seconds
        Time after which it is interrupted, as by Ctrl-C.

    Raises
    ------
    OSError
        If it cannot be started.
    """
    directory.mkdir(parents=True)
    output = directory / "output.txt"
    environ = {**environ, **variant.environ, "TIERS_RUN": str(directory.absolute())}
    with open(output, "wb") as file:
        # In a group of its own: what launches ranks passes the request to end on, or leaves them to us.
        with _interruptible():
            child = subprocess.Popen(
                command, env=environ, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
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
    return Outcome(variant, child.returncode, ended, _stats(directory), _last_line(output))


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


def _stats(directory: Path) -> dict[str, Any] | None:
    found = sorted(directory.glob(f"rank*/{STATS}"), key=lambda path: (len(path.parent.name), path.parent.name))
    for file in (directory / STATS, *found):
        with suppress(FileNotFoundError, ValueError):
            stats: dict[str, Any] = json.loads(file.read_text())
            return stats
    return None


def _last_line(file: Path) -> str:
    lines = file.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
