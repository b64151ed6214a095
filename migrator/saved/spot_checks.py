"""Checks that what is dropped is recomputed bit for bit, while the original is there: now and then, and new shapes.

A recomputation is used once a trial has succeeded. Later it may give other bits: a library may choose another kernel.
So one dropped tensor after the other is recomputed right when it is dropped, and compared with the original. A site
where they differ is no longer dropped. A tensor that is recomputed from more than `CHAIN` other dropped ones is never
checked.

A tensor of a shape that has not been tried is not dropped. When that shape comes for the second time it is tried, and
dropped from then on: so are those of programs whose sizes change from step to step and come again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.native.copy import lane
from torch_tiers.migrator.recompute.replays import Peek, operators_of, run
from torch_tiers.migrator.recompute.trials import same_bits
from torch_tiers.migrator.recompute.verified import Took, Verified, add
from torch_tiers.migrator.saved.dropped import Recomputed
from torch_tiers.migrator.saved.fresh_shapes import FreshShapes
from torch_tiers.migrator.streams import Compute, Event
from torch_tiers.migrator.tape.closure import Differs

log = logging.getLogger("tiers")

PART = 0.003  # of the program's time, on average
ROOM = 0.9  # of the budget in use: with more, nothing is made that the program does not ask for
PATIENCE = 16  # iterations for which a site is waited for: iterations differ
CHAIN = 16  # others that are dropped, too, and are to be made for one that is looked at: at most
MOST = 1 << 14  # shapes, over all sites, that are remembered as having come


class _Check(NamedTuple):
    """A check that the device works on: its site, its replay's name, and the result, which is valid after `end`.

    Of a shape that is tried it has what will be `verified`, and the host's seconds; the device's are until `made`.
    """

    key: str
    name: str
    is_same: Tensor
    begin: Event
    made: Event
    end: Event
    host: float
    verified: Verified | None

    def took(self) -> Took:
        """Return what to recompute it takes; as bytes besides the result, what it took for other shapes."""
        assert self.verified is not None
        seconds = _seconds(self.begin, self.made)
        scratch = max(took.scratch for took in self.verified.held.values())
        return Took(self.host if seconds is None else seconds, scratch, self.host)


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
    refused : set of str
        Sites of which nothing is dropped any more: something else was made than was dropped, or each shape is new.
    """

    def __init__(self, compute: Compute, budget: int) -> None:
        self.on = False
        self.refused: set[str] = set()
        self._fresh = FreshShapes()
        self._held: dict[str, Verified] = {}  # shapes that gave the same bits, by site
        self._compute = compute
        self._budget = budget
        self._times: dict[str, int] = {}  # how often each site was looked at
        self._next: str | None = None  # the site whose turn it is
        self._waited = 0  # iterations, for that
        self._may_take = 0.0  # seconds
        self._since = time.perf_counter()
        self._pending: list[_Check] = []
        self._met: dict[tuple[str, str], bool] = {}  # shapes of sites that came: whether each is tried, or failed
        self._used_memory = False  # in this iteration
        self._news = False

    def look(self, key: str, original: Tensor, made: Recomputed, look: Callable[[], Peek]) -> None:
        """Recompute a site's tensor while the original is there, if it is this site's turn.

        `look` makes a `Look`, which returns the inputs without side effects.
        """
        if not self.on:
            return
        times = self._times.setdefault(key, 0)
        if (self._next is not None and key != self._next) or self._may_take < 0:
            return  # as mostly
        if any(check.verified is None for check in self._pending) or self._compute.capturing():
            return
        self._times[key], self._next = times + 1, ""  # no other in this iteration
        began = time.perf_counter()
        if self._has_room(made, ROOM):
            self._compare(key, original, made, look)
            self._may_take -= time.perf_counter() - began

    def try_shape(
        self, key: str, original: Tensor, made: Recomputed, verified: Verified, look: Callable[[], Peek]
    ) -> None:
        """Recompute a site's tensor if its shape came before, and was not tried; `verified` is what holds for others.

        A shape that comes once is not worth it: a mixture of experts has new ones in every step.
        """
        shape = key, made.replay.names[made.index]
        if len(self._met) >= MOST:
            self._met.clear()
        if shape not in self._met:
            self._met[shape] = False
            self._fresh.came(key)
        elif not self._met[shape] and self._has_room(made, 1.0):  # once, so that the plan can be kept to
            self._met[shape] = True
            self._compare(key, original, made, look, verified)

    def _has_room(self, made: Recomputed, part: float) -> bool:
        """Return whether it fits into that part of the budget, and is made from few others."""
        chain = made.sources(CHAIN)
        needed = 2 * (made.nbytes + sum(each.nbytes for each in chain or ()))
        is_full = self._budget and self._compute.allocated() + needed > part * self._budget
        return chain is not None and not is_full

    def _compare(
        self,
        key: str,
        original: Tensor,
        made: Recomputed,
        look: Callable[[], Peek],
        verified: Verified | None = None,
    ) -> None:
        self._used_memory = True
        # There may be no memory for it, or no room to bring an input back: the program did not ask for this. What was
        # allocated is freed before it counts as the program's again.
        with (
            self._compute.untracked(),
            made.replay.untracked(),
            suppress(RuntimeError, TiersError),
            _disable_current_modes(),
        ):
            try:
                self._issue(key, original, made, look(), verified)
            except Differs:
                if verified is None:
                    self._found(key, operators_of(made.replay.names[made.index]))

    def _issue(self, key: str, original: Tensor, made: Recomputed, peek: Peek, verified: Verified | None) -> None:
        name = made.replay.names[made.index]
        begin, began = self._compute.mark(self._compute.stream()), time.perf_counter()
        again = run(made.replay, peek)[made.index]
        host, ready = time.perf_counter() - began, self._compute.mark(self._compute.stream())
        if verified is not None and (again.size(), again.stride()) != (original.size(), original.stride()):
            return
        same = same_bits(again.untyped_storage(), original.untyped_storage(), 0)
        is_same = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=same.is_cuda)
        with torch.no_grad():
            is_same.copy_(same, non_blocking=True)
        end = self._compute.mark(self._compute.stream())
        self._pending.append(_Check(key, name, is_same, begin, ready, end, host, verified))

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

    def refuse_fresh(self) -> set[str]:
        """Count an iteration; refuse the sites at which nearly every shape is new, and return them."""
        found = self._fresh.iteration_over() - self.refused
        self.refused |= found
        return found

    def take_held(self, present: Mapping[str, Verified]) -> dict[str, Verified]:
        """Return the shapes that gave the same bits since the last call, by site.

        Not where something was recorded under other conditions since: that is what holds at `present`.
        """
        held, self._held = self._held, {}
        return {key: one for key, one in held.items() if present.get(key, one).conditions == one.conditions}

    def _see(self) -> None:
        pending, self._pending = self._pending, []
        for check in pending:
            if not check.end.query():
                self._pending.append(check)
                continue
            is_same = bool(check.is_same)
            if check.verified is not None:
                if is_same:
                    self._met.pop((check.key, check.name), None)  # should it be forgotten, it may be tried again
                    add(self._held, {check.key: check.verified._replace(held={check.name: check.took()})})
                continue
            self._may_take -= _seconds(check.begin, check.end) or 0.0  # the host was charged as it issued that
            if not is_same:
                self._found(check.key, operators_of(check.name))

    def _found(self, key: str, operators: str) -> None:
        self._news = True
        self.refused.add(key)
        log.warning(
            "the tensor saved by %s is no longer recomputed bit for bit by %s: from now on it is offloaded. Gradients "
            "since its trial may differ from plain PyTorch's in their last bits",
            key,
            operators,
        )


def _seconds(start: Event, end: Event) -> float | None:
    """Return the device's seconds between two events that were passed; None without a GPU."""
    if isinstance(start, lane.TimedEvent) and isinstance(end, lane.TimedEvent):
        return start.elapsed_time(end) / 1e3
    return None
