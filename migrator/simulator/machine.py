"""The machine of a simulated step: a host, a device, and the lanes between tiers, each busy until some time.

The host issues what the device computes. While a lane is busy, compute is a little slower; and both directions of a
link together are slower than each alone.
"""

from __future__ import annotations

from torch_tiers.migrator.model.links import LANES, OPPOSITE, Links


class Machine:
    """When the device has computed (`now`), the host has issued (`host`) and each lane has copied what was given to it.

    All in seconds from the iteration's begin, `lead` seconds before which the host has begun.
    """

    def __init__(self, links: Links, lead: float) -> None:
        self.now = 0.0
        self.host = -lead
        self.slowed = 0.0  # seconds by which compute was slower beside busy lanes
        self.stalls = dict.fromkeys(LANES, 0.0)  # seconds for which compute waited for each
        self.busy = dict.fromkeys(LANES, 0.0)  # seconds of copies
        self._free = dict.fromkeys(LANES, 0.0)  # when each lane is free
        self._links = links
        self._slower = (("d2h", links.costs.d2h), ("h2d", links.costs.h2d))
        self._shared = min(1.0, links.both / (links.d2h + links.h2d))

    def compute(self, issuing: float, busy: float) -> None:
        """Have the host issue for some seconds what the device computes for some."""
        begin = self.now if self.now > self.host else self.host  # a search comes here often, and `max` takes longer
        now = begin
        self.host += issuing
        for lane, slower in self._slower:
            if (beside := self._free[lane] - begin) > 0:
                more = slower * (busy if busy < beside else beside)
                now += more
                self.slowed += more
        now += busy
        self.now = now if now > self.host else self.host

    def call(self, seconds: float, *, is_device: bool) -> None:
        """Have the host do something for us; where it is the device, too, the program waits for that."""
        self.host += seconds
        if is_device:
            self.now += seconds

    def wait(self, until: float, lane: str) -> None:
        """Have the device wait for a copy on a lane."""
        if until > self.now:
            self.stalls[lane] += until - self.now
            self.now = until

    def copy(self, lane: str, nbytes: int, after: float) -> tuple[float, float]:
        """Queue a transfer on a lane; when it begins and ends."""
        start = max(after, self._free[lane])
        seconds = self._links.latency + nbytes / getattr(self._links, lane)
        opposite = OPPOSITE.get(lane)
        if opposite is not None and self._free[opposite] > start:
            # Of what both lanes are busy for, only a part is done that each would do alone.
            together = min(seconds, (self._free[opposite] - start) * self._shared)
            seconds += together / self._shared - together
        self._free[lane] = start + seconds
        self.busy[lane] += seconds
        return start, start + seconds
