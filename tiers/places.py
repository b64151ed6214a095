"""Where our processes of one user meet on a node."""

from __future__ import annotations

import os
from pathlib import Path

LEDGERS = (Path("/dev/shm"), Path("/tmp"))  # the first that serves; not TMPDIR, which may differ between ranks


def of_user(place: Path) -> Path:
    """The directory within one of those that is private to this user."""
    return place / f"tiers-{os.geteuid()}"
