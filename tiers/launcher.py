"""What torchrun and other launchers tell a process by its environment."""

from __future__ import annotations

import multiprocessing
import os

from torch_tiers.config_keys import ConfigError


def processes(variable: str) -> int:
    """How many processes a launcher says there are; one where it says nothing.

    Raises
    ------
    ConfigError
        If that is no number of processes.
    """
    told = os.environ.get(variable) or "1"
    if not told.isdecimal() or int(told) < 1:
        raise ConfigError(f"{variable}={told!r}, which launchers set, is no number of processes")
    return int(told)


def rank() -> int | None:
    """This process's rank in its job: 0 where it is alone, None where it is not and no launcher says which it has."""
    if processes("WORLD_SIZE") == 1:
        return None if multiprocessing.parent_process() is not None else 0
    told = os.environ.get("RANK", "")
    return int(told) if told.isdecimal() else None


def is_started_beside_others() -> bool:
    """Whether another process of the same program was there before: it started this one, or a launcher did so again."""
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return multiprocessing.parent_process() is not None or again not in ("", "0")
