"""Who keeps the cores busy: this process, its children (DataLoader workers among them), or others."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psutil

from tiers.monitor.sensors import Clock, Rate, Reading, rates
from tiers.topology.memory import cores_available

_LIST_EVERY = 10.0  # seconds between two looks at who the children are, which takes milliseconds


class Cores:
    """CPU time of the process, of its tree, and of everybody, as cores busy."""

    name = "cores"

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._process = psutil.Process()
        self._children: dict[int, psutil.Process] = {}
        self._spent: dict[int, float] = {}
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
        others, spare = max(everybody - own - tree, 0.0), max(1 - tree / cores_available(), 0.0)
        return rates(at, [("own", own), ("tree", tree), ("others", others), ("spare", spare)])

    def _busy(self) -> Iterator[float]:
        """Seconds of CPU time so far: own, of the tree, of everybody."""
        own = self._process.cpu_times()
        yield own.user + own.system
        if self._clock() - self._listed > _LIST_EVERY:
            self._listed = self._clock()
            for child in self._process.children(recursive=True):
                self._children.setdefault(child.pid, child)
        for pid, child in list(self._children.items()):
            try:
                spent = child.cpu_times()
                self._spent[pid] = spent.user + spent.system
            except psutil.Error:
                del self._children[pid]
                self._ended += self._spent.pop(pid, 0.0)
        yield self._ended + sum(self._spent.values())
        total = psutil.cpu_times()
        yield total.user + total.system + total.nice + getattr(total, "irq", 0.0) + getattr(total, "softirq", 0.0)
