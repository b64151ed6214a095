"""Places in the file system that belong to one user: where processes meet on a node, and where what is built lies."""

from __future__ import annotations

import os
from pathlib import Path

LEDGERS = (Path("/dev/shm"), Path("/tmp"))  # the first that serves; not TMPDIR, which may differ between ranks


def of_user(place: Path) -> Path:
    """The directory within one of those that is private to this user."""
    return place / f"tiers-{os.geteuid()}"


def cache_directory() -> Path:
    """Where what is built for this user lies."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch-tiers"
    except RuntimeError:  # a user without a home: where nothing can be built, so that we do without what would be
        return Path("/nonexistent/.cache/torch-tiers")
