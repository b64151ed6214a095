"""Two clocks: the time that an iteration takes the host, and the time that it takes the device. Pure functions.

The host issues a stretch's operators one after the other. The device starts one when the one before is done and the
host has issued it. So where the host is slower the device waits for it, and where the device is slower its queue grows.
Work of the device alone is free where it waits for the host, and the other way round. After Daydream (Zhu et al., ATC
2020) and Lumos (Liang et al., MLSys 2025), with stretches in place of operators.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

QUEUE = 5e-3  # seconds by which a host is ahead at most: about a thousand launches, which a stream's queue holds


@dataclass(frozen=True, slots=True)
class Clocks:
    """The times of each stretch of an iteration.

    Attributes
    ----------
    device : sequence of float
        Seconds of kernels in each stretch.
    host : sequence of float
        Seconds that the host needs to issue them, without waiting for the device.
    joins : collection of int
        Stretches in which the host waits until the device has finished all that was issued.
    hooks : float
        Seconds that our hooks take the host in each stretch.
    """

    device: Sequence[float]
    host: Sequence[float]
    joins: Collection[int] = ()
    hooks: float = 0.0


def wall(clocks: Clocks) -> tuple[list[float], float]:
    """Return when an iteration, one of many alike, reaches the end of each stretch without us; and the host's lead.

    The lead is that at the begin of the iteration. Both are in seconds; the first stretch begins at 0, on the device.
    """
    ends, host = _played(clocks, 0.0)
    lead = min(QUEUE, max(0.0, ends[-1] - host)) if ends else 0.0
    if lead:
        ends, _ = _played(clocks, lead)
    if ends:  # a host that is slower all in all is what the iteration waits for
        ends[-1] = max(ends[-1], sum(clocks.host))
    return ends, lead


def host_bound(clocks: Clocks) -> list[bool]:
    """Return for each stretch whether the device waits for the host at its begin, if nothing moves or is recomputed."""
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
    """Return the end of each stretch on the device, and the end of the last on the host."""
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
