"""Who keeps the cores busy: this process, its children (DataLoader workers among them), or others."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from statistics import median

import psutil

from torch_tiers.launcher import processes
from torch_tiers.migrator.controller.background import planners
from torch_tiers.monitor.sensors import Clock, Rate, Reading, rates
from torch_tiers.topology.memory import cores_of_rank

_LIST_EVERY = 10.0  # seconds between two looks at who the children are, which takes milliseconds, at least ...
_LIST_COST = 1000  # ... and times what such a look takes,
_LIST_SOON = 100  # or times that, when a child has gone that did not rest
_LOOKS = 3  # of which the one in the middle says what children leave, and what is busy at all: a step shows after two
_TIRELESS = 0.8  # of the time a child is busy that does not wait for anybody to take what it makes ...
_RESTS = 0.5  # ... until it is busy for less than this
_SOON, _LATE = 0.3, 0.15  # weight of a look in the average that says so: to become tireless, and to be it no longer
_FOLLOWED = 6  # looks for which a child that has gone counts as it did: an epoch's workers follow those of the last
_SHORT = 0.5  # seconds between two looks: in less, one tick of the clock by which a child is timed is much


class _Child:
    """A child process, and how busy it is; what it spent before it was seen is nobody's.

    Raises
    ------
    psutil.Error
        If it is no longer there, or nothing can be told of it.
    """

    def __init__(self, process: psutil.Process) -> None:
        self.process = process
        self.tireless = 0.0  # cores that it keeps busy without rest
        self.gone = 0  # looks since it was last there
        self._spent = self._now()
        self._busy = self._cores = 0.0  # part of the time, and cores, on average

    def look(self, since: float) -> float:
        """Seconds that it has spent since the last look, `since` seconds ago."""
        before, self._spent = self._spent, self._now()
        spent = self._spent - before
        if since >= _SHORT:
            weight, threshold = (_LATE, _RESTS) if self.tireless else (_SOON, _TIRELESS)
            self._busy += weight * (min(spent / since, 1.0) - self._busy)  # however many threads it has
            self._cores += weight * (spent / since - self._cores)
            self.tireless = self._cores if self._busy >= threshold else 0.0
        return spent

    def _now(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


class Cores:
    """CPU time of the process, of its tree, and of everybody, as cores busy.

    Planner processes and other ranks of the same job count neither as this process's tree nor as others' load. The
    workers of other ranks do count as others' load.
    """

    name = "cores"

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._process = psutil.Process()
        self._children: dict[int, _Child] = {}
        self._aside: dict[int, _Child] = {}  # planners and other ranks
        self._ranks = frozenset[int]()
        self._spent = 0.0  # seconds, by children since they were first seen
        self._spent_aside = 0.0
        self._recently: tuple[deque[float], ...] = deque(maxlen=_LOOKS), deque(maxlen=_LOOKS)  # spare, and load
        self._looked = float("-inf")
        self._list_due = self._list_soon = float("-inf")
        self._rates = tuple(Rate() for _ in range(4))

    def why_not(self) -> str | None:  # noqa: D102
        try:
            list(self._busy())
        except (psutil.Error, OSError) as error:
            return str(error)
        return None

    def read(self) -> Reading | None:  # noqa: D102
        at = self._clock()
        busy = [rate(at, total) for rate, total in zip(self._rates, self._busy(), strict=True)]
        if None in busy:
            return None
        own, tree, aside, everybody = (part or 0.0 for part in busy)
        others = max(everybody - own - tree - aside, 0.0)
        # Parts of what is there for this process: each of a node's ranks has workers of its own.
        cores = cores_of_rank(processes("LOCAL_WORLD_SIZE"))
        for looks, now in zip(self._recently, (max(1 - tree / cores, 0.0), tree + others), strict=True):
            looks.append(now)
        spare, load = (median(looks) if len(looks) == _LOOKS else None for looks in self._recently)
        found = {"own": own, "tree": tree, "others": others, "tireless": self._tireless() / cores}
        return rates(at, [*found.items(), ("load", load), ("spare", spare)])

    def _tireless(self) -> float:
        """Cores that children keep busy without rest; those that have gone, or who has come in their place."""
        children = self._children.values()
        there = sum(child.tireless for child in children if not child.gone)
        gone = sum(child.tireless for child in children if child.gone)
        return max(there, gone)

    def _busy(self) -> Iterator[float]:
        """Seconds of CPU time so far: own, of the tree, of planners and other ranks, of everybody."""
        own = self._process.cpu_times()
        yield own.user + own.system
        now = self._clock()
        since, self._looked = now - self._looked, now
        for pid, child in list(self._children.items()):
            try:
                self._spent += child.look(since)
                child.gone = 0
            except psutil.Error:
                child.gone += 1
                if child.gone > _FOLLOWED or not child.tireless:
                    del self._children[pid]
        followed = any(child.gone == 1 for child in self._children.values())  # others may have come in its place
        if now > (self._list_soon if followed else self._list_due):
            self._list(now)
        yield self._spent
        self._look_aside(since)
        yield self._spent_aside
        total = psutil.cpu_times()
        yield total.user + total.system + total.nice + getattr(total, "irq", 0.0) + getattr(total, "softirq", 0.0)

    def _list(self, now: float) -> None:
        """Look who the children are."""
        begin, planning = time.thread_time(), planners()
        for pid in self._children.keys() & planning:  # it was seen before it was known to plan
            del self._children[pid]
        for process in self._process.children(recursive=True):
            known = self._children.get(process.pid)
            if process.pid not in planning and (known is None or known.process != process):
                with suppress(psutil.Error):
                    self._children[process.pid] = _Child(process)
        self._ranks = frozenset(_ranks_beside(self._process))
        cost = time.thread_time() - begin
        self._list_due, self._list_soon = now + max(_LIST_EVERY, _LIST_COST * cost), now + _LIST_SOON * cost

    def _look_aside(self, since: float) -> None:
        there = planners() | self._ranks
        for pid in self._aside.keys() - there:
            del self._aside[pid]
        for pid in there:
            with suppress(psutil.Error):
                process = self._aside.get(pid) or self._aside.setdefault(pid, _Child(psutil.Process(pid)))
                self._spent_aside += process.look(since)


def _ranks_beside(process: psutil.Process) -> Iterator[int]:
    """The other ranks of this node: who was started beside `process`, and has a rank of its own."""
    if processes("LOCAL_WORLD_SIZE") == 1:
        return
    with suppress(psutil.Error):
        launcher = process.parent()
        for sibling in launcher.children() if launcher is not None else ():
            with suppress(psutil.Error):
                its = sibling.environ()
                same_job = "LOCAL_RANK" in its and its.get("MASTER_PORT") == os.environ.get("MASTER_PORT")
                if sibling.pid != process.pid and same_job:
                    yield sibling.pid
