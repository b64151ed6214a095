"""Memory traffic from the memory controllers' own counters, through perf_event_open(2)."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch_tiers.monitor.sensors import Clock, Rate, Reading, rates

_SYSCALL = {"x86_64": 298, "aarch64": 241}  # perf_event_open
_ATTR_BYTES = 128  # struct perf_event_attr, zero past what is set here
_CLOEXEC = 8
_EVENTS = ("cas_count_read", "cas_count_write", "data_read", "data_write")
_MIB = 2.0**20


@dataclass(frozen=True, slots=True)
class Counter:
    """One event of one memory controller: its perf type, config, a core of its socket, and bytes per count."""

    type: int
    config: int
    core: int
    scale: float


class Uncore:
    """Reads and writes of all integrated memory controllers (``uncore_imc*``)."""

    name = "uncore"

    def __init__(self, devices: Path = Path("/sys/bus/event_source/devices"), clock: Clock = time.monotonic) -> None:
        self._devices = devices
        self._clock = clock
        self._rate = Rate()
        self._open: list[tuple[int, float]] = []

    def why_not(self) -> str | None:  # noqa: D102
        counters = list(find_counters(self._devices))
        if not counters:
            return "perf shows no memory controllers, as in most virtual machines"
        if platform.machine() not in _SYSCALL:
            return f"not known on {platform.machine()}"
        try:
            if not self._open:
                self._open = [(_open(counter), counter.scale) for counter in counters]
        except OSError as error:
            return f"{error.strerror}: allow it with CAP_PERFMON or kernel.perf_event_paranoid=0"
        return None

    def read(self) -> Reading | None:  # noqa: D102
        total = sum(struct.unpack("q", os.read(file, 8))[0] * scale for file, scale in self._open)
        at = self._clock()
        return rates(at, [("traffic", self._rate(at, total))])


def find_counters(devices: Path) -> Iterator[Counter]:
    """What sysfs describes, one per event, controller and socket."""
    for folder in sorted(devices.glob("uncore_imc*")):
        cores = (folder / "cpumask").read_text().strip().split(",") if (folder / "cpumask").exists() else ["0"]
        for event in _EVENTS:
            path = folder / "events" / event
            if not path.exists():
                continue
            scale = float(path.with_name(f"{event}.scale").read_text()) * _MIB
            kind, config = int((folder / "type").read_text()), parse_config(path.read_text())
            yield from (Counter(kind, config, int(core.split("-")[0]), scale) for core in cores)


def parse_config(text: str) -> int:
    """``event=0x04,umask=0x03`` as perf's config: the umask lies above the event's byte."""
    words = dict(word.split("=") for word in text.strip().split(",") if "=" in word)
    return int(words.get("event", "0"), 0) | int(words.get("umask", "0"), 0) << 8


def _open(counter: Counter) -> int:
    attr = struct.pack("IIQ", counter.type, _ATTR_BYTES, counter.config).ljust(_ATTR_BYTES, b"\0")
    libc = ctypes.CDLL(None, use_errno=True)
    number = _SYSCALL[platform.machine()]
    file = int(libc.syscall(number, attr, -1, counter.core, -1, ctypes.c_ulong(_CLOEXEC)))
    if file < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return file
