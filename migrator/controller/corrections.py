"""What measurements have corrected of recorded times, of the budget and of the links. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_tiers.migrator.model.links import Calls


@dataclass(frozen=True, slots=True)
class Corrections:
    """Corrections of recorded times, of the budget and of the links; see `Feedback`.

    Attributes
    ----------
    budget : int
        Bytes added to the budget.
    pace, host_pace : float
        Factors for the program's times on the device and on the host.
    hooks : float
        Seconds that the hooks take the host in an iteration, under any plan.
    issuing : float
        The host's seconds for the program, as recorded.
    joins : bool
        Whether the host waits for the device between two iterations.
    calls : Calls
        Host costs of a plan's parts.
    parts : dict
        Factors for the assumed bandwidths, by lane.
    """

    budget: int = 0
    pace: float = 1.0
    host_pace: float = 1.0
    hooks: float = 0.0
    issuing: float = 0.0
    joins: bool = False
    calls: Calls = field(default_factory=Calls)
    parts: dict[str, float] = field(default_factory=dict)
