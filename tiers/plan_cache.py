"""Plans of earlier runs, in the user's cache directory: a run of the same program begins with them."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import xxhash

from torch_tiers.migrator.controller.cached_plans import CachedPlans, fingerprint
from torch_tiers.migrator.model.trace import Site

log = logging.getLogger("tiers")

PARTIAL = ".partial"
HOUR = 3600
MOST = 256  # files; those that were not used for the longest go


class PlanCacheOnDisk:
    """What was learned of programs on one device, with one budget.

    Parameters
    ----------
    directory : Path
        Where the files lie.
    context : object
        What else plans depend on: versions, the device, the budget, the policy.
    """

    def __init__(self, directory: Path, *context: object) -> None:
        self._directory = directory
        self._context = context

    def find(self, sites: Sequence[Site]) -> CachedPlans | None:
        """The plans of a program that has such an iteration; None if there are none, or none that can be read."""
        path = self._path(sites)
        try:
            if not self._is_ours():
                return None
            content = path.read_text()
            digest, _, text = content.partition("\n")
            if digest != _digest(text):
                raise ValueError("it was cut off, or changed")
            found = CachedPlans.from_json(text)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.info("the cached plan in %s is ignored, the program is learned anew: %s", path, error)
            return None
        with suppress(OSError):  # it may be there to be read alone
            os.utime(path)
        return found

    def store(self, plans: CachedPlans) -> None:
        """Keep it for programs that have any of its iterations. What cannot be written is not kept."""
        text = plans.to_json()
        with suppress(OSError):
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not self._is_ours():
                return  # nobody would read it
            for trace in plans.traces:
                path = self._path(trace.sites)
                # Whole or not at all: threads, and ranks of one program, write the same.
                number, partial = tempfile.mkstemp(suffix=PARTIAL, dir=self._directory)
                try:
                    with os.fdopen(number, "w") as file:
                        file.write(f"{_digest(text)}\n{text}")
                    os.replace(partial, path)
                except OSError:
                    os.unlink(partial)
                    raise
            self._forget_old()

    def _is_ours(self) -> bool:
        """Whether nobody else may put plans there."""
        found = self._directory.stat()
        return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)

    def _path(self, sites: Sequence[Site]) -> Path:
        return self._directory / f"{fingerprint(sites, *self._context)}.json"

    def _forget_old(self) -> None:
        files = sorted(self._directory.glob("*.json"), key=lambda path: path.stat().st_mtime)
        begun = (path for path in self._directory.glob(f"*{PARTIAL}") if path.stat().st_mtime < time.time() - HOUR)
        for path in (*files[:-MOST], *begun):  # the latter of processes that were killed
            path.unlink(missing_ok=True)


def _digest(content: str) -> str:
    return xxhash.xxh3_128(content.encode()).hexdigest()
