"""Who keeps the cores busy: this process, its children (DataLoader workers among them), or others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from statistics import median

import psutil

from migrator.learning.background import planners
from tiers.launcher import processes
from tiers.monitor.sensors import Clock, Rate, Reading, rates
from tiers.topology.memory import cores_of_rank

_LIST_EVERY = 10.0  # seconds between two looks at who the children are, which takes milliseconds, at least ...
_LIST_COST = 1000  # ... and times what such a look takes
_LOOKS = 3  # of which the one in the middle says what children leave and which rest: a step shows after two
_TIRELESS = 0.8  # of the time a child is busy that does not wait for anybody to take what it makes ...
_RESTS = 0.6  # ... until it is busy for less than this


class Cores:
    """CPU time of the process, of its tree, and of everybody, as cores busy.

    Who plans for us is no part of the tree: that is over in seconds.
    """

    name = "cores"

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._process = psutil.Process()
        self._children: dict[int, psutil.Process] = {}
        self._spent: dict[int, float] = {}  # seconds, since it was first seen
        self._before: dict[int, float] = {}  # and until then
        self._recently: tuple[deque[float], ...] = deque(maxlen=_LOOKS), deque(maxlen=_LOOKS)  # spare, and tireless
        self._looked = float("-inf")
        self._tireless: dict[int, float] = {}  # cores that a child keeps busy which does not rest
        self._ended = 0.0  # seconds that children spent who are gone
        self._list_due = float("-inf")
        self._rates = (Rate(), Rate(), Rate())

    def why_not(self) -> str | None:  # noqa: D102
        try:
            self._busy()
        except (psutil.Error, OSError) as error:
            return str(error)
        return None

    def read(self) -> Reading | None:  # noqa: D102
        at = self._clock()
        own, tree, everybody = (rate(at, total) for rate, total in zip(self._rates, self._busy(), strict=True))
        if own is None or tree is None or everybody is None:
            return None
        # Parts of what is there for this process: each of a node's ranks has workers of its own.
        cores = cores_of_rank(processes("LOCAL_WORLD_SIZE"))
        parts = max(1 - tree / cores, 0.0), sum(self._tireless.values()) / cores
        for looks, part in zip(self._recently, parts, strict=True):
            looks.append(part)
        spare, tireless = (median(looks) if len(looks) == _LOOKS else None for looks in self._recently)
        others = max(everybody - own - tree, 0.0)
        return rates(at, [("own", own), ("tree", tree), ("others", others), ("spare", spare), ("tireless", tireless)])

    def _busy(self) -> Iterator[float]:
        """Seconds of CPU time so far: own, of the tree, of everybody."""
        own = self._process.cpu_times()
        yield own.user + own.system
        now = self._clock()
        since, self._looked = now - self._looked, now
        if now > self._list_due:
            self._list(now)
        for pid, child in list(self._children.items()):
            try:
                times = child.cpu_times()
                # What it spent before it was seen was not spent since the last look.
                spent = times.user + times.system - self._before.setdefault(pid, times.user + times.system)
                self._rests(pid, (spent - self._spent.get(pid, 0.0)) / since if since > 0 else 0.0)
                self._spent[pid] = spent
            except psutil.Error:
                del self._children[pid]
                self._before.pop(pid, None)
                self._tireless.pop(pid, None)
                self._ended += self._spent.pop(pid, 0.0)
        yield self._ended + sum(self._spent.values())
        total = psutil.cpu_times()
        yield total.user + total.system + total.nice + getattr(total, "irq", 0.0) + getattr(total, "softirq", 0.0)

    def _list(self, now: float) -> None:
        """Look who the children are."""
        begin, ours = time.thread_time(), planners()
        for child in self._process.children(recursive=True):
            if child.pid not in ours:
                self._children.setdefault(child.pid, child)
        self._list_due = now + max(_LIST_EVERY, _LIST_COST * (time.thread_time() - begin))

    def _rests(self, pid: int, busy: float) -> None:
        """Take in how many cores a child has kept busy since the last look."""
        if busy >= (_RESTS if pid in self._tireless else _TIRELESS):
            self._tireless[pid] = busy
        else:
            self._tireless.pop(pid, None)
