"""Who holds how much of a tier: what a refused claim and an error about a full tier report."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from torch_tiers.allocator.sizes import format_size

_NAMED = 4  # holders, the largest; of the others their number


class Holder(NamedTuple):
    """A process that holds something of a tier, as it calls itself."""

    nbytes: int
    pid: int
    program: str


def describe_holders(holders: Iterable[Holder]) -> str:
    """Say who holds how much, the largest first."""
    largest = sorted(holders, reverse=True)
    texts = [f"{format_size(nbytes)} by {_named(pid, program)}" for nbytes, pid, program in largest[:_NAMED]]
    return ", ".join(texts) + (f" and more by {len(largest) - _NAMED} others" if len(largest) > _NAMED else "")


def _named(pid: int, program: str) -> str:
    return f"this process, pid {pid}" if pid == os.getpid() else f"pid {pid} ({program})"
