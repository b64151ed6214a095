"""Checks from time to time that dropped tensors are still recomputed bit for bit.

A recomputation is used once a trial has succeeded. Later it may give other bits: a library may choose another kernel.
So one dropped tensor after the other is recomputed right when it is dropped, and compared with the original. A site
where they differ is no longer dropped. A tensor that is recomputed from more than `CHAIN` other dropped ones is never
checked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.native.copy import lane
from torch_tiers.migrator.recompute.replays import Peek, Replay, operators_of, run
from torch_tiers.migrator.recompute.trials import same_bits
from torch_tiers.migrator.saved.dropped import Recomputed
from torch_tiers.migrator.streams import Compute, Event
from torch_tiers.migrator.tape.closure import Differs

log = logging.getLogger("tiers")

PART = 0.003  # of the program's time, on average
ROOM = 0.9  # of the budget in use: with more, nothing is made that the program does not ask for
PATIENCE = 16  # iterations for which a site is waited for: iterations differ
CHAIN = 16  # others that are dropped, too, and are to be made for one that is looked at: at most


class _Check(NamedTuple):
    """A check that the device works on: its site, its operators, and the result, which is valid after `end`."""

    key: str
    operators: str
    is_same: Tensor
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
    on : bool
        Whether any is to be made: none in an iteration that is measured.
    differing : set of str
        Sites at which something else was made than was dropped, for good.
    """

    def __init__(self, compute: Compute, budget: int) -> None:
        self.on = False
        self.differing: set[str] = set()
        self._compute = compute
        self._budget = budget
        self._times: dict[str, int] = {}  # how often each site was looked at
        self._next: str | None = None  # the site whose turn it is
        self._waited = 0  # iterations, for that
        self._may_take = 0.0  # seconds
        self._since = time.perf_counter()
        self._pending: _Check | None = None
        self._used_memory = False  # in this iteration
        self._news = False

    def look(self, key: str, original: Tensor, made: Recomputed, look: Callable[[], Peek]) -> None:
        """Recompute a site's tensor while the original is there, if it is this site's turn.

        `look` makes a `Look`, which returns the inputs without side effects.
        """
        if not self.on:
            return
        times = self._times.setdefault(key, 0)
        if (self._next is not None and key != self._next) or self._may_take < 0 or self._pending is not None:
            return
        self._times[key], self._next = times + 1, ""  # no other in this iteration
        chain = made.sources(CHAIN)
        needed = 2 * (made.nbytes + sum(each.nbytes for each in chain or ()))
        if chain is None or (self._budget and self._compute.allocated() + needed > ROOM * self._budget):
            return
        began, self._used_memory = time.perf_counter(), True
        # There may be no memory for it, or no room to bring an input back: the program did not ask for this. What was
        # allocated is freed before it counts as the program's again.
        with (
            self._compute.untracked(),
            made.replay.untracked(),
            suppress(RuntimeError, TiersError),
            _disable_current_modes(),
        ):
            try:
                self._compare(key, original, made.replay, made.index, look())
            except Differs:
                self._found(key, operators_of(made.replay.names[made.index]))
        self._may_take -= time.perf_counter() - began

    def _compare(self, key: str, original: Tensor, replay: Replay, index: int, peek: Peek) -> None:
        begin = self._compute.mark(self._compute.stream())
        again = run(replay, peek)[index]
        same = same_bits(again.untyped_storage(), original.untyped_storage(), 0)
        is_same = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=same.is_cuda)
        with torch.no_grad():
            is_same.copy_(same, non_blocking=True)
        end = self._compute.mark(self._compute.stream())
        self._pending = _Check(key, operators_of(replay.names[index]), is_same, begin, end)

    def iteration_over(self) -> bool:
        """Grant the next iteration its share of time; return whether a site turned out to differ. Wait for no check."""
        now = time.perf_counter()
        self._may_take = min(0.0, self._may_take) + PART * (now - self._since)
        self._since = now
        self._waited += self.on
        if self._next and self._waited > PATIENCE:  # it is not dropped any more
            del self._times[self._next]
            self._next = None
        if not self._next and self._times:
            self._next, self._waited = min(self._times, key=self._times.__getitem__), 0
        if not self._compute.capturing():  # while a graph is captured no event may be asked
            if self._used_memory:
                self._used_memory = False
                self._compute.tidy()
                self._may_take -= time.perf_counter() - now
            self._see()
        news, self._news = self._news, False
        return news

    def _see(self) -> None:
        check = self._pending
        if check is None or not check.end.query():
            return
        self._pending = None
        if isinstance(check.begin, lane.TimedEvent) and isinstance(check.end, lane.TimedEvent):
            self._may_take -= check.begin.elapsed_time(check.end) / 1e3  # the host was charged as it issued that
        if not check.is_same.item():
            self._found(check.key, check.operators)

    def _found(self, key: str, operators: str) -> None:
        self._news = True
        self.differing.add(key)
        log.warning(
            "the tensor saved by %s is no longer recomputed bit for bit by %s: from now on it is offloaded. Gradients "
            "since its trial may differ from plain PyTorch's in their last bits",
            key,
            operators,
        )
