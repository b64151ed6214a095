"""Places in the file system that belong to one user: where processes meet on a node, and where what is built lies."""

from __future__ import annotations

import os
from pathlib import Path

LEDGERS = (Path("/dev/shm"), Path("/tmp"))  # the first that serves; not TMPDIR, which may differ between ranks


def of_user(place: Path) -> Path:
    """The directory within one of those that is private to this user."""
    return place / f"tiers-{os.geteuid()}"


def boards(named: Path | None) -> list[Path]:
    """Where running programs show their state: the ledger that is `named`, else what serves first.

    What the system keeps for this user alone comes before places that all users share. All are looked at, as a program
    that was started by a service or in a container may have another choice than the shell that asks for it.
    """
    if named is not None:
        return [named]
    given = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    runtime = given if given.is_absolute() else Path(f"/run/user/{os.geteuid()}")
    return [runtime / "tiers", *map(of_user, LEDGERS)]


def ledgers(named: Path | None) -> list[Path]:
    """Where processes may have their ledger: the one that is `named`, else all places of which each takes the first."""
    return [named] if named is not None else [*map(of_user, LEDGERS)]


def cache_directory() -> Path:
    """Where what is built for this user lies."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch-tiers"
    except RuntimeError:  # a user without a home: where nothing can be built, so that we do without what would be
        return Path("/nonexistent/.cache/torch-tiers")
