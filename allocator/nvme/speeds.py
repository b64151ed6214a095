"""Measures how fast each way to a directory is, once, and keeps the results in the cache directory.

Each way is measured in a child process, as cuFile reads its parameters only when it starts, and as it may hang or die.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch_tiers.allocator.nvme.facts import P2PDMA_VARIABLE, Machine, Place
from torch_tiers.allocator.nvme.ways import DIRECT, Measured, Speeds, Way
from torch_tiers.allocator.sizes import KiB

log = logging.getLogger("tiers")

FORMAT = 1
TIMEOUT = 60.0  # seconds for a child: torch and a CUDA context take ten on a busy machine
_FAILED_FOR = 24 * 3600.0  # seconds after which a way that failed is tried again
_MOST_BYTES = 64 * KiB
_FASTEST = 1e13  # bytes per second: what is above was not measured
_WAYS: tuple[Way, ...] = ("host", *DIRECT)
_CHILD = (sys.executable, "-m", "torch_tiers.allocator.nvme.time_way")
_OF_THE_PARENT = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""With expandable segments a buffer is not of cudaMalloc, and cannot be registered."""

Measure = Callable[[Way, Path, str], Measured]
"""Measures a way with a directory and the GPU of a uuid."""


def speeds(
    ways: Sequence[Way], machine: Machine, place: Place, cache: Path | None, measure: Measure | None = None
) -> dict[Way, Measured]:
    """What was measured of `ways` before, and what is measured now of those that were not.

    Processes that ask for the same do so one after another: measured at once, they would halve each other's speed.
    """
    measure = measure or run_child
    gpu = machine.gpu.uuid if machine.gpu is not None else ""
    if cache is None:
        return {way: measure(way, place.path, gpu) for way in ways}
    key = key_of(machine, place)
    with _alone(cache):
        found = cached(cache, key)
        missing = [way for way in ways if way not in found]
        if missing:
            log.info("nvme at %s is measured once (%s), which takes some seconds", place.path, ", ".join(missing))
        new = {way: measure(way, place.path, gpu) for way in missing}
        if new:
            with suppress(OSError):  # then it is measured again the next time
                keep(cache, key, {**found, **new})
    return {way: {**found, **new}[way] for way in ways}


def key_of(machine: Machine, place: Place) -> dict[str, str]:
    """Everything that a speed depends on."""
    return {
        "gpu": machine.gpu.uuid if machine.gpu is not None else "",
        "kernel": machine.kernel,
        "driver": machine.driver or "",
        "device": place.device,
        "filesystem": place.kind,
        "options": ",".join(place.options),
        "kvikio": machine.kvikio or "",
    }


def file_of(cache: Path, key: Mapping[str, str]) -> Path:
    """Where what belongs to `key` is kept."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache / f"nvme-{name}.json"


def cached(cache: Path, key: Mapping[str, str], now: float | None = None) -> dict[Way, Measured]:
    """The speeds kept for `key`; none if the file is not one that `keep` would write."""
    try:
        with file_of(cache, key).open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        kept = json.loads(text) if len(text) <= _MOST_BYTES else None
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(kept, dict) or kept.get("format") != FORMAT or kept.get("key") != key:
        return {}
    ways, at = kept.get("ways"), kept.get("at")
    if not isinstance(ways, dict) or not isinstance(at, int | float) or not set(ways) <= {*_WAYS}:
        return {}
    found = {way: _measured(ways[way]) for way in _WAYS if way in ways}
    if any(measured is None for measured in found.values()):
        return {}
    fresh = 0 <= (time.time() if now is None else now) - at < _FAILED_FOR
    return {way: it for way, it in found.items() if isinstance(it, Speeds) or (fresh and it is not None)}


def keep(cache: Path, key: Mapping[str, str], ways: Mapping[Way, Measured]) -> None:
    """Write what was measured, as a whole or not at all."""
    file = file_of(cache, key)
    cache.mkdir(parents=True, exist_ok=True)
    entries = {way: it if isinstance(it, str) else _to_json(it) for way, it in ways.items()}
    text = json.dumps({"format": FORMAT, "key": dict(key), "at": time.time(), "ways": entries}, indent=1)
    new = file.with_name(f"{file.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        new.write_text(text)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)


def environment(way: Way, gpu: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the child: cuFile must not fall back silently, and tiers must not start in it."""
    child = {name: value for name, value in environ.items() if not name.startswith("TIERS_")}
    for name in _OF_THE_PARENT:
        child.pop(name, None)
    child["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    if gpu:
        child["CUDA_VISIBLE_DEVICES"] = f"GPU-{gpu}"
    if way in DIRECT:
        child[P2PDMA_VARIABLE] = "true" if way == "p2pdma" else "false"
        child["CUFILE_ALLOW_COMPAT_MODE"] = "false"
    return child


def run_child(
    way: Way, directory: Path, gpu: str, *, command: Sequence[str] = _CHILD, timeout: float = TIMEOUT
) -> Measured:
    """Measure in a child process; a text that says why not, if it hangs, dies or fails."""
    with tempfile.TemporaryDirectory(prefix="tiers-") as scratch:  # cuFile leaves its log where it is started
        try:
            child = subprocess.Popen(
                [*command, way, str(directory.absolute())],
                cwd=scratch,
                env=environment(way, gpu, os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            return f"the measurement of {way} cannot be started: {error.strerror}"
        try:
            out, _ = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            child.kill()
            with suppress(subprocess.TimeoutExpired):  # the kernel may be unable to end it: then it is left alone
                child.communicate(timeout=1)
            return f"the measurement of {way} did not end in {timeout:.0f} s"
        except BaseException:
            child.kill()
            raise
    return _answer(way, child.returncode, out)


def _answer(way: Way, code: int, out: bytes) -> Measured:
    lines = out.decode(errors="replace").strip().splitlines()
    try:
        answer: Any = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict) and isinstance(reason := answer.get("error"), str):
        return f"the measurement of {way} failed: {_one_line(reason)}"
    measured = _measured(answer)
    if isinstance(measured, Speeds) and code == 0:
        return measured
    how = f"signal {-code}" if code < 0 else f"code {code}"
    return f"the measurement of {way} ended with {how} and without a result"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _to_json(speeds: Speeds) -> dict[str, float]:
    return {"write": speeds.write, "read": speeds.read, "both": speeds.both}


def _measured(entry: Any) -> Measured | None:
    if isinstance(entry, str):
        return _one_line(entry) or None
    if not isinstance(entry, dict) or set(entry) != {"write", "read", "both"}:
        return None
    for value in entry.values():
        if type(value) not in (int, float) or not math.isfinite(value) or not 0 < value < _FASTEST:
            return None
    return Speeds(float(entry["write"]), float(entry["read"]), float(entry["both"]))


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """Keep other processes out, where the cache can be written to."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = os.open(cache / "nvme.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
