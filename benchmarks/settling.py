"""Whether the plans of a session stay as they are: until then steps tell what learning takes."""

from __future__ import annotations

from dataclasses import dataclass

from torch_tiers.assembly import Session
from torch_tiers.migrator.model.plan import Plan


@dataclass(frozen=True, slots=True)
class Plans:
    """The plans of a thread.

    Attributes
    ----------
    now
        What is carried out.
    coming
        Whether others are on their way.
    stay
        Whether these stay, as far as anybody can say.
    """

    now: tuple[Plan, ...]
    coming: bool
    stay: bool


def plans(session: Session) -> Plans:
    """Those of this thread."""
    saver = session.runtime.saver()
    movers = saver.movers.armed if saver is not None else []
    return Plans(
        tuple(plan for mover in movers for plan in mover.learner.plans),
        any(mover.learner.planning for mover in movers),
        all(mover.idle or mover.learner.settled for mover in movers),
    )
