"""How worn a drive is, by what it tells of itself."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from torch_tiers.allocator.sizes import format_size

UNIT = 512_000  # bytes that NVMe drives count in
TIMEOUT = 5.0  # seconds, for all of them
GRACE = 0.5  # seconds, for one that is killed
MOST_PERCENT = 255  # that a drive can tell


class Wear(NamedTuple):
    """What a drive is made for, and how much of that is used up.

    Attributes
    ----------
    percent : int
        Of its rated write endurance that is used; it may be over 100.
    written : int
        Bytes that were written to it so far.
    """

    percent: int
    written: int

    def __str__(self) -> str:
        """Say so."""
        return f"{self.percent}% of its rated write endurance is used; {format_size(self.written)} were written so far"

    @property
    def left(self) -> int | None:
        """Bytes that may still be written to it by its rating; None while it is too new to tell."""
        return self.written * max(0, 100 - self.percent) // self.percent if self.percent else None


def wear(drive: str) -> Wear | None:
    """Ask a drive how worn it is; None where that cannot be read.

    It runs smartctl, which needs root.

    Parameters
    ----------
    drive
        The block device's name, such as ``nvme0n1``.
    """
    return wear_of([drive]).get(drive)


def wear_of(drives: Iterable[str]) -> dict[str, Wear]:
    """Ask several at once; those that tell."""
    deadline, asked = time.monotonic() + TIMEOUT, {}
    for drive in drives:
        command = ["smartctl", "--json", "--attributes", f"/dev/{drive}"]
        with suppress(OSError):
            asked[drive] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
    found = {drive: _answer(process, deadline) for drive, process in asked.items()}
    return {drive: told for drive, told in found.items() if told is not None}


def _answer(process: subprocess.Popen[bytes], deadline: float) -> Wear | None:
    try:
        # It exits with other codes, too, when a drive is about to fail, and tells all the same.
        told, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        found: Any = json.loads(told)["nvme_smart_health_information_log"]
        percent, written = int(found["percentage_used"]), int(found["data_units_written"]) * UNIT
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)  # and no longer: a drive that hangs may hold it for good
        return None
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError, RecursionError):
        return None
    finally:
        if process.stdout is not None:
            process.stdout.close()
    return Wear(percent, written) if 0 <= percent <= MOST_PERCENT and 0 <= written < 1 << 63 else None
