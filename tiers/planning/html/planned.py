"""The last plan of a run, and all that the figures need to know of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.effects import Effect, effect
from torch_tiers.migrator.planner.intervals import Floats
from torch_tiers.migrator.simulator import Simulated, simulate
from torch_tiers.planning.answer import Answer
from torch_tiers.planning.html.watched import Watched
from torch_tiers.planning.why import Why

NO_PLAN = "The run left no plan that can be read, so there is nothing to draw."


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and the iteration under it as it is simulated.

    Attributes
    ----------
    trace : Trace
        The iteration that was recorded.
    plan : Plan
        The plan for it.
    links : Links
        The links of the machine.
    effect : Effect
        What the plan's choice brings about.
    machine : Watched
        What the machine does when.
    why : Why
        What the plan comes to.
    answer : Answer
        The same at one look.
    """

    trace: Trace
    plan: Plan
    links: Links
    effect: Effect
    machine: Watched
    why: Why
    answer: Answer

    @property
    def result(self) -> Simulated:
        """What the iteration comes to."""
        return self.why.result

    @property
    def timed(self) -> bool:
        """Whether times were measured; where they were not, figures have positions in their place."""
        return bool(self.trace.times)

    @property
    def edges(self) -> Floats:
        """Where each stretch begins on the horizontal axis, in ms or positions, and where the last one ends."""
        if not self.timed:
            return np.arange(len(self.result.hbm) + 1, dtype=np.float64)
        return np.concatenate(([0.0], self.result.clock, [self.result.seconds])) * 1e3

    @property
    def across(self) -> str:
        """The name of the horizontal axis."""
        return "ms of the iteration" if self.timed else "position in the iteration"


def planned(trace: Trace, plan: Plan, links: Links, why: Why, answer: Answer) -> Planned:
    """Simulate a plan once more, on a machine that is watched."""
    outcome = effect(trace, {trace.by_key[key].storage for key in plan.recompute})
    machine = Watched(links, trace.lead)
    simulate(trace, links, plan, outcome=outcome, machine=machine)
    return Planned(trace, plan, links, outcome, machine, why, answer)
