"""What was measured of an iteration. Plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch_tiers.migrator.model.timing import HostTime, IterationTime
from torch_tiers.migrator.model.trace import Trace


@dataclass(frozen=True)
class IterationOutcome:
    """What one iteration has come to; by default it went as planned, and was not timed.

    Attributes
    ----------
    trace : Trace or None
        Its trace, if it was recorded.
    peak : int
        Highest use of HBM in the iteration, in bytes.
    whole : bool
        Whether everything that lives as long as the program existed when the iteration began: the optimizer makes its
        state in the first step, so peaks before that are too low.
    mispredicted : bool
        Whether considerably more was saved, or was not, than any plan expects.
    resized : bool
        Whether what was saved as planned was considerably larger or smaller than that.
    pressed : bool
        Whether the allocator had to flush its cache to stay within the budget.
    overflow : int
        Bytes for which HBM had no room in the allocator's last period, and which it had to put elsewhere.
    laid_out : bool
        Whether memory was laid out for that period, and it came so.
    ends_period : bool
        Whether no iteration before this one has told of that period.
    refused : bool
        Whether a tier had no room for what the plan offloads, so that it stayed in HBM. Then memory and time say
        nothing about the plan.
    iteration_time : IterationTime, optional
        What this iteration took the device, or the one before it, and how long compute waited for each lane.
    host : HostTime, optional
        What this iteration took the host.
    static : callable
        Returns the bytes in use now, between two iterations; 0 if nobody counts them. A call takes 0.1 ms.
    """

    trace: Trace | None
    peak: int
    whole: bool = True
    mispredicted: bool = False
    resized: bool = False
    pressed: bool = False
    overflow: int = 0
    laid_out: bool = True
    ends_period: bool = True
    refused: bool = False
    iteration_time: IterationTime | None = None
    host: HostTime | None = None
    static: Callable[[], int] = int
