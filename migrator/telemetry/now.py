"""What a run comes to at the end of an iteration, for who watches it. Plain data."""

from __future__ import annotations

from typing import NamedTuple


class Now(NamedTuple):
    """Numbers of a run as they are now.

    Attributes
    ----------
    hbm, hbm_budget : int
        The most bytes in use in the last iteration, and the budget; of several devices of the fullest one.
    steps, iterations : int
        So far.
    step_s : float or None
        Seconds of a step, in the median of the last few; None before there were two.
    ideal_s, predicted_s : float or None
        Seconds that an iteration is predicted to take with everything kept, and under the plan; None where that is not
        known, or iterations differ.
    """

    hbm: int = 0
    hbm_budget: int = 0
    steps: int = 0
    iterations: int = 0
    step_s: float | None = None
    ideal_s: float | None = None
    predicted_s: float | None = None
