"""Two clocks: what an iteration takes the host, and what it takes the device. Pure functions on plain data.

The host issues a stretch's operators one after the other; the device starts one when it is through with the one before
and the host has issued it. So where the host is slower the device waits for it, and where the device is slower its
queue grows. What costs the device alone is free where it waits for the host, and the other way round. After Daydream
(Zhu et al., ATC 2020) and Lumos (Liang et al., MLSys 2025), with stretches in place of operators.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

QUEUE = 5e-3  # seconds by which a host is ahead at most: about a thousand launches, which a stream's queue holds


@dataclass(frozen=True, slots=True)
class Clocks:
    """What each stretch of an iteration takes.

    Attributes
    ----------
    device : sequence of float
        Seconds of kernels in each stretch.
    host : sequence of float
        Seconds that the host needs to issue them, by itself: without waiting for the device.
    joins : collection of int
        Stretches in which the host waits until the device is through with all that was issued.
    hooks : float
        Seconds for which ours keep the host in each stretch, which they would not without us.
    """

    device: Sequence[float]
    host: Sequence[float]
    joins: Collection[int] = ()
    hooks: float = 0.0


def wall(clocks: Clocks) -> tuple[list[float], float]:
    """When an iteration that is one of many alike reaches the end of each stretch without us; and the host's lead then.

    The lead is that as the iteration begins. Both in seconds; the first stretch begins at 0, on the device.
    """
    ends, host = _played(clocks, 0.0)
    lead = min(QUEUE, max(0.0, ends[-1] - host)) if ends else 0.0
    if lead:
        ends, _ = _played(clocks, lead)
    if ends:  # a host that is slower all in all is what the iteration waits for
        ends[-1] = max(ends[-1], sum(clocks.host))
    return ends, lead


def host_bound(clocks: Clocks) -> list[bool]:
    """Whether the device waits for the host at the begin of each stretch, where nothing moves or is recomputed."""
    clocks = replace(clocks, host=[issuing + clocks.hooks for issuing in clocks.host])
    ends, lead = wall(clocks)
    begins = [0.0, *ends[:-1]]
    host, bound = -lead, []
    for number, (begin, issuing) in enumerate(zip(begins, clocks.host, strict=True)):
        host += issuing
        bound.append(host > begin + clocks.device[number])
        if number in clocks.joins:
            host = ends[number]
    return bound


def _played(clocks: Clocks, lead: float) -> tuple[list[float], float]:
    """The end of each stretch on the device, and the end of the last on the host."""
    device, host = 0.0, -lead
    ends: list[float] = []
    for number, (busy, issuing) in enumerate(zip(clocks.device, clocks.host, strict=True)):
        device = max(device, host) + busy
        host += issuing
        device = max(device, host)
        if number in clocks.joins:
            host = device
        ends.append(device)
    return ends, host
