"""A simulated machine that notes what it does when."""

from __future__ import annotations

from typing import NamedTuple

from torch_tiers.migrator.model.links import LANES, Links
from torch_tiers.migrator.simulator.machine import Machine

_NOTHING = 1e-9  # seconds: what is left where times that are added up in another order are compared


class Span(NamedTuple):
    """From when to when, in seconds from the iteration's begin."""

    begin: float
    end: float


class Watched(Machine):
    """Notes when the host issues, the device computes, the device waits and the lanes copy.

    Attributes
    ----------
    issuing, computing : list of Span
        When the host issues, and when the device computes.
    calling : list of Span
        When the host is busy with page groups.
    for_host : list of Span
        When the device waits for the host.
    for_lane : dict of str to list of Span
        When the device waits for each lane.
    copies : dict of str to list of Span
        When each lane copies.
    carried : dict of str to int
        Bytes that each lane copies.
    ahead : list of (float, float)
        When the device is through with each stretch, and by how many seconds the host is ahead of it then.
    """

    def __init__(self, links: Links, lead: float) -> None:
        super().__init__(links, lead)
        self.issuing: list[Span] = []
        self.computing: list[Span] = []
        self.calling: list[Span] = []
        self.for_host: list[Span] = []
        self.for_lane: dict[str, list[Span]] = {lane: [] for lane in LANES}
        self.copies: dict[str, list[Span]] = {lane: [] for lane in LANES}
        self.carried = dict.fromkeys(LANES, 0)
        self.ahead: list[tuple[float, float]] = [(0.0, lead)]

    def compute(self, issuing: float, busy: float) -> None:
        """See `Machine`."""
        host, before, slowed = self.host, self.now, self.slowed
        super().compute(issuing, busy)
        begin = max(before, host)
        done = begin + busy + self.slowed - slowed
        self._note(self.issuing, host, self.host)
        self._note(self.for_host, before, begin)
        self._note(self.computing, begin, done)
        self._note(self.for_host, done, self.now)
        self.ahead.append((self.now, self.now - self.host))

    def call(self, seconds: float, *, is_device: bool) -> None:
        """See `Machine`."""
        begin = self.now if is_device else self.host
        self._note(self.calling, begin, begin + seconds)
        super().call(seconds, is_device=is_device)

    def wait(self, until: float, lane: str) -> None:
        """See `Machine`."""
        self._note(self.for_lane[lane], self.now, until)
        super().wait(until, lane)

    def copy(self, lane: str, nbytes: int, after: float) -> tuple[float, float]:
        """See `Machine`."""
        begin, end = super().copy(lane, nbytes, after)
        self._note(self.copies[lane], begin, end)
        self.carried[lane] += nbytes
        return begin, end

    @staticmethod
    def _note(spans: list[Span], begin: float, end: float) -> None:
        if end - begin > _NOTHING:
            spans.append(Span(begin, end))
