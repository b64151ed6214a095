"""Memory traffic from resctrl (Intel RDT and AMD QoS: memory bandwidth monitoring)."""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch_tiers.monitor.sensors import Clock, Rate, Reading, rates


class Resctrl:
    """``mbm_total_bytes`` of all domains, of the root group and of every other control group."""

    name = "resctrl"

    def __init__(self, root: Path = Path("/sys/fs/resctrl"), clock: Clock = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._rate = Rate()

    def why_not(self) -> str | None:  # noqa: D102
        if not self._root.is_dir():
            return "the kernel or the processor has none, or the container does not show it"
        counters = self._counters()
        if not counters:
            return "not mounted, or without memory bandwidth monitoring: mount -t resctrl resctrl /sys/fs/resctrl"
        if not all(os.access(path, os.R_OK) for path in counters):
            return f"{counters[0]} may not be read by this user"
        return None

    def read(self) -> Reading | None:  # noqa: D102
        counts = [path.read_text().strip() for path in self._counters()]
        if not counts:
            raise OSError(f"no counters are left in {self._root}")
        if any(count == "Unavailable" for count in counts):  # for a moment, while the hardware counts anew
            return None
        at = self._clock()
        return rates(at, [("traffic", self._rate(at, sum(map(int, counts))))])

    def _counters(self) -> list[Path]:
        pattern = "mon_data/mon_L3_*/mbm_total_bytes"
        return sorted([*self._root.glob(pattern), *self._root.glob(f"*/{pattern}")])
