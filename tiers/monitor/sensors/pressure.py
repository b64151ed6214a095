"""Pressure stall information: how long somebody waited for a core or for memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from torch_tiers.monitor.sensors import Clock, Rate, Reading, rates

_RESOURCES = ("cpu", "memory")


class Pressure:
    """The cgroup's own pressure where the kernel tells it, else the machine's.

    Pressure on memory is reclaim, not bandwidth; pressure on the cores shows that preprocessing is short of them.
    """

    name = "pressure"

    def __init__(self, root: Path = Path("/"), clock: Clock = time.monotonic) -> None:
        self._files = dict(_files(root))
        self._clock = clock
        self._rates = {resource: Rate() for resource in self._files}

    def why_not(self) -> str | None:  # noqa: D102
        if not self._files:
            return "the kernel was built or started without it (psi=1)"
        try:
            for path in self._files.values():
                path.read_bytes()  # where it is built in but switched off, the files are there and reading fails
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        return None

    def read(self) -> Reading | None:  # noqa: D102
        at = self._clock()
        found = ((name, self._rates[name](at, _seconds(path.read_text()))) for name, path in self._files.items())
        return rates(at, found)


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    for resource in _RESOURCES:
        for path in (*_own_cgroup(root, f"{resource}.pressure"), root / "proc/pressure" / resource):
            if path.exists():
                yield resource, path
                break


def _own_cgroup(root: Path, name: str) -> Iterator[Path]:
    """The file of the cgroup that this process is in, and in a container that of its top; version 2 only."""
    listing = root / "proc/self/cgroup"
    if listing.exists():
        for line in listing.read_text().splitlines():
            if line.startswith("0::"):
                # At the top there is no such file: the machine's then tells the same.
                yield root / "sys/fs/cgroup" / line[len("0::") :].strip("/") / name


def _seconds(text: str) -> float:
    """The total of ``some``: seconds in which at least one task waited."""
    line = next(line for line in text.splitlines() if line.startswith("some"))
    return int(line.rpartition("total=")[2]) / 1e6
