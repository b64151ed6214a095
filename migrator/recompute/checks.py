"""Sees now and then whether a tensor that is dropped would still be made again bit for bit.

A replay is believed once it was tried. What it was tried with may change later: a library may choose another kernel.
So one dropped tensor after the other is made again right when it is dropped, while the original is there, and compared
with that. A site where the two differ is not dropped any more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from torch_tiers.allocator.errors import TiersError
from torch_tiers.migrator.lanes import Compute, Event
from torch_tiers.migrator.recompute.dropped import Peek, Recomputed, run
from torch_tiers.migrator.recompute.replays import Replay, operators_of
from torch_tiers.migrator.recompute.trials import same_bits

log = logging.getLogger("tiers")

PART = 0.003  # of the program's time, at most
ROOM = 0.9  # of the budget in use: with more, nothing is made that the program does not ask for


class _Check(NamedTuple):
    """One that the device is at: the site, what makes it, and whether it is the same, once `end` is over."""

    key: str
    operators: str
    told: Tensor
    begin: Event
    end: Event


class Checks:
    """The checks of one device's program.

    Parameters
    ----------
    compute : Compute
        The device's.
    budget : int
        HBM budget, in bytes.

    Attributes
    ----------
    differing : set of str
        Sites at which something else was made than was dropped, for good.
    """

    def __init__(self, compute: Compute, budget: int) -> None:
        self.differing: set[str] = set()
        self._compute = compute
        self._budget = budget
        self._number = self._turn = 0  # of what was dropped in this period, and which of that is next
        self._may_take = 0.0  # seconds
        self._since = time.perf_counter()
        self._pending: _Check | None = None
        self._asked = False  # for memory, in this period

    def look(self, key: str, original: Tensor, made: Recomputed, look: Callable[[], Peek]) -> None:
        """A site's tensor is dropped, and still there: make it again, if it is this one's turn.

        `look` makes who hands out what it is made from as if nobody had asked.
        """
        self._number += 1
        if self._number <= self._turn or self._may_take < 0 or self._pending is not None:
            return
        self._turn = self._number
        used = self._compute.allocated()
        if self._budget and used + 2 * made.nbytes > ROOM * self._budget:
            return
        began, self._asked = time.perf_counter(), True
        # There may be no memory for it, or no room to bring an input back: the program did not ask for this.
        with suppress(RuntimeError, TiersError), self._compute.aside(), made.replay.aside():
            self._compare(key, original, made.replay, made.index, look())
        self._may_take -= time.perf_counter() - began

    def _compare(self, key: str, original: Tensor, replay: Replay, index: int, peek: Peek) -> None:
        begin = self._compute.mark(self._compute.stream())
        again = run(replay, peek)[index]
        same = same_bits(again.untyped_storage(), original.untyped_storage(), 0)
        told = torch.empty((), dtype=torch.bool, pin_memory=same.is_cuda)
        with torch.no_grad():
            told.copy_(same, non_blocking=True)
        end = self._compute.mark(self._compute.stream())
        self._pending = _Check(key, operators_of(replay.names[index]), told, begin, end)

    def period_over(self) -> bool:
        """The next period may take its share of time; whether a site turned out to differ. Waits for nobody."""
        now = time.perf_counter()
        self._may_take = min(0.0, self._may_take) + PART * (now - self._since)
        self._since = now
        if self._asked and not self._compute.capturing():
            self._asked = False
            self._compute.tidy()
            self._may_take -= time.perf_counter() - now
        if self._turn >= self._number:
            self._turn = 0
        self._number = 0
        check = self._pending
        if check is None or not check.end.query():
            return False
        self._pending = None
        if isinstance(check.begin, torch.cuda.Event) and isinstance(check.end, torch.cuda.Event):
            self._may_take -= check.begin.elapsed_time(check.end) / 1e3  # the host was charged as it issued that
        if check.told.item():
            return False
        self.differing.add(check.key)
        log.warning(
            "what %s saves is not made again bit for bit any more, by %s: from now on it moves. Gradients since it was "
            "tried may differ from plain PyTorch's in their last bits",
            check.key,
            check.operators,
        )
        return True
