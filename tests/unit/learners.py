"""Learners of a small program, and iterations for them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from tests.unit.modelled import gpt
from tests.unit.traces import chain
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.controller.learner import Learner
from torch_tiers.migrator.controller.outcome import IterationOutcome
from torch_tiers.migrator.controller.plan_requests import Job
from torch_tiers.migrator.controller.planned import PlannedIteration
from torch_tiers.migrator.controller.relief import DemotableState
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.intervals import occupancy
from torch_tiers.migrator.planner.sizes import look_ahead
from torch_tiers.migrator.policies import POLICIES, Policy

TARGET = 1000 * MiB
FLASHNEURON = POLICIES["flashneuron"]
TRACE = chain([10 * MiB] * 40)
MODEL = gpt(blocks=8)


def peak_of(trace: Trace) -> int:
    return int((occupancy(trace) + np.array(trace.others)).max())


def learned(peak: int = 700 * MiB, policy: Policy = FLASHNEURON) -> Learner:
    learner = Learner(policy, TARGET)
    assert learner.iteration_over(IterationOutcome(TRACE, peak))
    return learner


def room(learner: Learner) -> int:
    (plan,) = learner.plans
    return plan.room


def unrecorded(learner: Learner, peak: int, mispredicted: bool = False) -> bool:
    """An iteration that was not recorded."""
    return learner.iteration_over(IterationOutcome(None, peak, mispredicted=mispredicted))


def foreseen(plan: Plan) -> set[str]:
    return {*plan.keep, *(key for group in plan.groups for key in group.sites)}


def most(trace: Trace, plan: Plan | None) -> int:
    """Saved bytes that are in HBM at once under `plan`: two groups under way beside what is kept."""
    if plan is None:
        return 0
    under_way = look_ahead(max((group.nbytes for group in plan.groups), default=0), plan.room)
    return plan.kept_bytes + min(under_way, plan.moved_bytes)


def run(learner: Learner, iterations: Sequence[tuple[Trace, int]], elsewhere: int = 0) -> tuple[list[bool], list[int]]:
    """A program of `iterations`, each with memory of its own beside the saved bytes.

    Returns which of them changed the plans, and their peaks. `elsewhere` is a peak of another moment, in
    which saved bytes play no part.
    """
    changed, peaks = [], []
    for trace, own in iterations:
        keys = {site.key for site in trace.sites}
        known = [plan for plan in learner.plans if keys <= foreseen(plan)]
        peak = max(elsewhere, own + most(trace, known[0] if known else None))
        recorded = trace if learner.records_next else None
        mispredicted = recorded is None and not known
        changed.append(learner.iteration_over(IterationOutcome(recorded, peak, mispredicted=mispredicted)))
        peaks.append(peak)
    return changed, peaks


class Gives:
    """Streams weights for whatever is `asked`, and demotes state, but for what it `keeps`; `gone` is what went."""

    def __init__(self, asked: list[int], state: DemotableState | None = None, keeps: int = 0) -> None:
        self.asked = asked
        self.gone: list[int] = []
        self.state = state
        self.keeps = keeps

    def demotable(self) -> DemotableState | None:
        return None if self.gone else self.state

    def demote(self, nbytes: int) -> int:
        self.gone.append(max(0, nbytes - self.keeps))
        return self.gone[-1]

    def stream_weights(self, nbytes: int) -> bool:
        self.asked.append(nbytes)
        return True


class Later:
    """Jobs that are done when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Job, Future[tuple[PlannedIteration, ...]]]] = []

    def __call__(self, job: Job) -> Future[tuple[PlannedIteration, ...]]:
        self.jobs.append((job, Future()))
        return self.jobs[-1][1]

    def work(self) -> None:
        for job, future in self.jobs:
            if not future.done():
                future.set_result(job())


def large(trace: Trace = MODEL, policy: str = "auto") -> tuple[Learner, Later]:
    """A learner that has seen a trace which takes long to plan for, and what does its jobs."""
    later = Later()
    learner = Learner(POLICIES[policy], peak_of(trace) * 3 // 4, submit=later)
    assert not learner.iteration_over(IterationOutcome(trace, 0))
    return learner, later


def large_and_planned() -> tuple[Learner, Later]:
    """The same, with its first plans."""
    learner, later = large()
    later.work()
    assert unrecorded(learner, 0)
    return learner, later


def planned(policy: str = "auto", share: float = 0.75, **arguments: Any) -> Learner:
    """A learner with plans for the model at this share of its peak."""
    learner = Learner(POLICIES[policy], int(share * peak_of(MODEL)), **arguments)
    assert learner.iteration_over(IterationOutcome(MODEL, 0))
    return learner
