"""The run directory, `TIERS_RUN`: what a run leaves behind for `tiers report`, `tiers plan` and Perfetto."""

from __future__ import annotations

import gzip
import json
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_tiers.config import Config, ConfigError
from torch_tiers.launcher import is_started_beside_others, processes
from torch_tiers.migrator.controller.learned import Learned
from torch_tiers.migrator.model import trace_json
from torch_tiers.migrator.telemetry.timeline import Timeline

STATS = "stats.json"
TRACE = "trace.json"
PLAN = "plan.json"
TIMELINE = "timeline.json.gz"
LOSSES = "losses.csv"
FILES = (STATS, TRACE, PLAN, TIMELINE, LOSSES)
ENOUGH = 5  # steps under the last plan: a few are no median


def step_seconds(stats: Mapping[str, Any]) -> float | None:
    """Seconds of a step in the median: under the last plan if there was one after it, or else of all there were."""
    step: Mapping[str, Any] = stats["step_s"]
    settled: Mapping[str, Any] = step.get("settled", {"steps": 0})  # of which earlier versions did not tell
    seconds: float | None = step["median"] if settled["steps"] < ENOUGH else settled["median"]
    return seconds


def step_range(stats: Mapping[str, Any]) -> tuple[float, float] | None:
    """Seconds that nine of ten steps under the last plan lie between; None if there were too few."""
    settled: Mapping[str, Any] = stats["step_s"].get("settled", {"steps": 0})
    if settled["steps"] < ENOUGH or settled.get("low") is None or settled.get("high") is None:
        return None
    return settled["low"], settled["high"]


def by_iteration(stats: Mapping[str, Any]) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Bytes moved by lane and seconds stalled by cause, of an iteration: of those under the last plan, if they tell."""
    settled = stats.get("settled")  # of which earlier versions did not tell
    if settled is not None and stats["step_s"]["settled"]["steps"] >= ENOUGH:
        iterations, moved, stalled = max(settled["iterations"], 1), settled["moved"], settled["stalled_s"]
    else:
        iterations, moved = max(stats["iterations"], 1), stats["moved"]
        stalled = {cause: stall["seconds"] for cause, stall in stats["stalls"].items()}
    return (
        {lane: nbytes / iterations for lane, nbytes in moved.items()},
        {cause: seconds / iterations for cause, seconds in stalled.items()},
    )


def find(config: Config) -> Path | None:
    """The run directory of this process, one per rank; None if none is asked for.

    Raises
    ------
    ConfigError
        If it cannot be written, or holds an earlier run, or any file of the name of one of a run's.
    """
    if config.run is None:
        return None
    rank = os.environ.get("RANK") if processes("WORLD_SIZE") > 1 else None
    directory = config.run / f"rank{rank}" if rank else config.run
    try:
        standing = next(parent for parent in (directory, *directory.parents) if _is_there(parent))
        if writable := standing.is_dir():
            # Tried, as rights do not tell of a full disk, of quotas or of what the kernel makes up, such as /proc.
            with tempfile.TemporaryFile(dir=standing) as probe:
                probe.write(b"tiers")
        used = [name for name in FILES if writable and _is_there(directory / name)]
    except OSError as error:  # also of a name that is too long, or a directory above that is closed to this user
        raise ConfigError(
            f"TIERS_RUN: {directory} cannot be written: {error.strerror}; name a directory that you may write to"
        ) from None
    if not writable:
        raise ConfigError(
            f"TIERS_RUN: {directory} cannot be written: {standing} is not a directory; name one that you may write to"
        )
    # A process that the program has started, or that its launcher starts again, goes beside what is there: see `write`.
    if used and not config.run_force and not is_started_beside_others():
        holds = "an earlier run" if STATS in used else f"a {used[0]}, in whose place the run's would be"
        raise ConfigError(f"TIERS_RUN: {directory} holds {holds}: name another directory or set TIERS_RUN_FORCE=1")
    return directory


def _is_there(path: Path) -> bool:
    """Whether there is something, be it a link to nothing; OSError where that cannot be told."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def write(directory: Path, stats: dict[str, Any], learned: Learned | None, timeline: Timeline, *, force: bool) -> Path:
    """Write what a run did, and what it learned; over an earlier run with `force`. Where it is now."""
    directory.mkdir(parents=True, exist_ok=True)
    told = json.dumps(stats, indent=2).encode() + b"\n"
    try:
        # First, as whose it is has the directory: trainers without RANK, started by hand or by torch.multiprocessing,
        # share it and may end together, and none must overwrite another's.
        others = [directory / name for name in FILES[1:] if _is_there(directory / name)]
        if others and not force:
            raise FileExistsError
        _write(directory / STATS, told, over=force)
        for path in others:  # of an earlier run, whatever becomes of this one's
            path.unlink(missing_ok=True)
    except FileExistsError:
        directory = directory / f"process{os.getpid()}"
        directory.mkdir()
        _write(directory / STATS, told)
    if learned is not None:
        _write(directory / TRACE, trace_json.write(learned.trace).encode() + b"\n")
        _write(directory / PLAN, learned.plan.to_json().encode() + b"\n")
    # Late, as it takes long: who ends programs may not wait for it.
    _write(directory / TIMELINE, gzip.compress(timeline.to_json().encode(), compresslevel=6))
    return directory


def write_losses(directory: Path, losses: Sequence[tuple[int, float]], *, force: bool = True) -> Path:
    """Write the step and the value of each loss, if there are any, over those of an earlier run with `force`.

    A value is written so that reading it gives the same bits. Returns where they are now.
    """
    if not losses:
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    told = "".join(["step,loss\n", *(f"{step},{value!r}\n" for step, value in losses)]).encode()
    try:
        _write(directory / LOSSES, told, over=force)
    except FileExistsError:  # of another process that shares the directory: see `write`
        directory = directory / f"process{os.getpid()}"
        directory.mkdir()
        _write(directory / LOSSES, told)
    return directory


def _write(path: Path, content: bytes, *, over: bool = True) -> None:
    """Write a file as a whole or not at all: a program that gets SIGTERM may get SIGKILL soon after.

    Raises
    ------
    FileExistsError
        If there is one already, and `over` is false. Of several processes one alone can make it.
    """
    # Where others may write, too, they have put nothing in the way, and no link to what is none of ours.
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        if over:
            part.replace(path)
        else:
            _link(part, path)
    finally:
        part.unlink(missing_ok=True)


def _link(part: Path, path: Path) -> None:
    """Give what is written its name, as `replace` would, but never over another's."""
    try:
        os.link(part, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links: for a moment the file is there and empty
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        part.replace(path)
