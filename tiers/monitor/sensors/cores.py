"""Who keeps the cores busy: this process, its children (DataLoader workers among them), or others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from statistics import median

import psutil

from migrator.learning.background import planners
from tiers.launcher import processes
from tiers.monitor.sensors import Clock, Rate, Reading, rates
from tiers.topology.memory import cores_of_rank

_LIST_EVERY = 10.0  # seconds between two looks at who the children are, which takes milliseconds, at least ...
_LIST_COST = 1000  # ... and times what such a look takes
_LOOKS = 3  # of which the one in the middle says what children leave, and what is busy at all: a step shows after two
_TIRELESS = 0.8  # of the time a child is busy that does not wait for anybody to take what it makes ...
_RESTS = 0.5  # ... until it is busy for less than this
_SOON, _LATE = 0.3, 0.15  # weight of a look in the average that says so: to become tireless, and to be it no longer
_FOLLOWED = 8  # looks for which a child that has gone counts as it did: an epoch's workers follow those of the last


class _Child:
    """A child process, and how busy it is."""

    def __init__(self, process: psutil.Process) -> None:
        self.process = process
        self.tireless = 0.0  # cores that it keeps busy without rest
        self.gone = 0  # looks since it was last there
        self._total: float | None = None  # seconds that it has spent
        self._busy = 0.0  # cores, on average

    def look(self, since: float) -> float:
        """Seconds that it has spent since the last look, `since` seconds ago; none that it spent before the first.

        Raises
        ------
        psutil.Error
            If it is no longer there.
        """
        times = self.process.cpu_times()
        before, self._total = self._total, times.user + times.system
        if before is None:
            return 0.0
        spent = self._total - before
        if since > 0:
            self._busy += (_LATE if self.tireless else _SOON) * (spent / since - self._busy)
            self.tireless = self._busy if self._busy >= (_RESTS if self.tireless else _TIRELESS) else 0.0
        return spent


class Cores:
    """CPU time of the process, of its tree, and of everybody, as cores busy.

    Who plans for us is no part of the tree, nor of the others: that is over in seconds.
    """

    name = "cores"

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._process = psutil.Process()
        self._children: dict[int, _Child] = {}
        self._planners: dict[int, _Child] = {}
        self._spent = 0.0  # seconds, by children since they were first seen
        self._planned = 0.0  # and by planners
        self._recently: tuple[deque[float], ...] = deque(maxlen=_LOOKS), deque(maxlen=_LOOKS)  # spare, and load
        self._looked = float("-inf")
        self._list_due = float("-inf")
        self._rates = (Rate(), Rate(), Rate())

    def why_not(self) -> str | None:  # noqa: D102
        try:
            list(self._busy())
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
        for looks, now in zip(self._recently, (max(1 - tree / cores, 0.0), max(everybody - own, 0.0)), strict=True):
            looks.append(now)
        spare, load = (median(looks) if len(looks) == _LOOKS else None for looks in self._recently)
        tireless = sum(child.tireless for child in self._children.values()) / cores
        found = {"own": own, "tree": tree, "others": max(everybody - own - tree, 0.0)}
        return rates(at, [*found.items(), ("load", load), ("spare", spare), ("tireless", tireless)])

    def _busy(self) -> Iterator[float]:
        """Seconds of CPU time so far: own, of the tree, of everybody but planners."""
        own = self._process.cpu_times()
        yield own.user + own.system
        now = self._clock()
        since, self._looked = now - self._looked, now
        if now > self._list_due:
            self._list(now)
        for pid, child in list(self._children.items()):
            try:
                self._spent += child.look(since)
                child.gone = 0
            except psutil.Error:
                if not child.gone:  # others may have come in its place
                    self._list_due = min(self._list_due, now)
                child.gone += 1
                if child.gone > _FOLLOWED or not child.tireless:
                    del self._children[pid]
        yield self._spent
        self._look_at_planners(since)
        total = psutil.cpu_times()
        everybody = total.user + total.system + total.nice + getattr(total, "irq", 0.0) + getattr(total, "softirq", 0.0)
        yield everybody - self._planned

    def _list(self, now: float) -> None:
        """Look who the children are."""
        begin, planning = time.thread_time(), planners()
        for pid in self._children.keys() & planning:  # it was seen before it was known to plan
            del self._children[pid]
        for process in self._process.children(recursive=True):
            known = self._children.get(process.pid)
            if process.pid not in planning and (known is None or known.process != process):
                self._children[process.pid] = _Child(process)
        self._list_due = now + max(_LIST_EVERY, _LIST_COST * (time.thread_time() - begin))

    def _look_at_planners(self, since: float) -> None:
        planning = planners()
        for pid in self._planners.keys() - planning:
            del self._planners[pid]
        for pid in planning:
            with suppress(psutil.Error):
                planner = self._planners.get(pid) or self._planners.setdefault(pid, _Child(psutil.Process(pid)))
                self._planned += planner.look(since)
