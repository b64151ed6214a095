"""How worn a drive is, by what it tells of itself."""

from __future__ import annotations

import json
import subprocess
from typing import Any, NamedTuple

from torch_tiers.allocator.sizes import format_size

UNIT = 512_000  # bytes that NVMe drives count in
TIMEOUT = 5.0  # seconds


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
    command = ["smartctl", "--json", "--attributes", f"/dev/{drive}"]
    try:
        # It exits with other codes, too, when a drive is about to fail, and tells all the same.
        told = subprocess.run(command, capture_output=True, timeout=TIMEOUT, check=False).stdout
        found: Any = json.loads(told)["nvme_smart_health_information_log"]
        return Wear(int(found["percentage_used"]), int(found["data_units_written"]) * UNIT)
    except (OSError, subprocess.SubprocessError, ValueError, ArithmeticError, LookupError, TypeError, RecursionError):
        return None
