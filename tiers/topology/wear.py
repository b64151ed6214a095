"""How worn a drive is, by what it tells of itself."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from torch_tiers.allocator.sizes import format_size

UNIT = 512_000  # bytes that NVMe drives count in
TIMEOUT = 5.0  # seconds


def wear(drive: str) -> str | None:
    """Say how much of a drive's rated write endurance is used; None where that cannot be read.

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
        used, written = int(found["percentage_used"]), int(found["data_units_written"]) * UNIT
    except (OSError, subprocess.SubprocessError, ValueError, ArithmeticError, LookupError, TypeError, RecursionError):
        return None
    return f"{used}% of its rated write endurance is used; {format_size(written)} were written so far"
