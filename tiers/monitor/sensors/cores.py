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

_LIST_EVERY = 10.0  # seconds between two looks at who the children are, which takes milliseconds
_LOOKS = 3  # of which the one in the middle says what children leave: a step shows after two


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
        self._spare: deque[float] = deque(maxlen=_LOOKS)
        self._ended = 0.0  # seconds that children spent who are gone
        self._listed = float("-inf")
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
        # What they leave of this process's part: each of a node's ranks has workers of its own.
        self._spare.append(max(1 - tree / cores_of_rank(processes("LOCAL_WORLD_SIZE")), 0.0))
        spare = median(self._spare) if len(self._spare) == _LOOKS else None
        return rates(at, [("own", own), ("tree", tree), ("others", max(everybody - own - tree, 0.0)), ("spare", spare)])

    def _busy(self) -> Iterator[float]:
        """Seconds of CPU time so far: own, of the tree, of everybody."""
        own = self._process.cpu_times()
        yield own.user + own.system
        if self._clock() - self._listed > _LIST_EVERY:
            self._listed = self._clock()
            ours = planners()
            for child in self._process.children(recursive=True):
                if child.pid not in ours:
                    self._children.setdefault(child.pid, child)
        for pid, child in list(self._children.items()):
            try:
                times = child.cpu_times()
                spent = times.user + times.system
                # What it spent before it was seen was not spent since the last look.
                self._spent[pid] = spent - self._before.setdefault(pid, spent)
            except psutil.Error:
                del self._children[pid]
                self._before.pop(pid, None)
                self._ended += self._spent.pop(pid, 0.0)
        yield self._ended + sum(self._spent.values())
        total = psutil.cpu_times()
        yield total.user + total.system + total.nice + getattr(total, "irq", 0.0) + getattr(total, "softirq", 0.0)
