"""What of a run is cached for the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.unit.learners import MODEL, peak_of
from torch_tiers.migrator.controller.cached_plans import CachedPlans
from torch_tiers.migrator.controller.cached_run import CachedRun, Verification
from torch_tiers.migrator.controller.feedback import Feedback
from torch_tiers.migrator.controller.in_force import PlansInForce
from torch_tiers.migrator.controller.planned import plan_all
from torch_tiers.migrator.model.links import PCIE_GEN5, Links
from torch_tiers.migrator.model.timing import at_pace
from torch_tiers.migrator.model.trace import Site
from torch_tiers.migrator.policies import POLICIES

TARGET = peak_of(MODEL) * 3 // 4


class Single(list[CachedPlans]):
    """A cache that takes every program for the same."""

    def find(self, sites: Sequence[Site]) -> CachedPlans | None:
        return self[-1] if self else None

    def store(self, plans: CachedPlans) -> None:
        self.append(plans)


def in_force(links: Links = PCIE_GEN5) -> tuple[PlansInForce, Feedback]:
    plans, feedback = PlansInForce(TARGET, set(), lambda nbytes: False), Feedback(TARGET, links)
    request = feedback.request((MODEL,))
    plans.begin(plan_all(POLICIES["auto"], request), request.traces, (MODEL,))
    return plans, feedback


def test_plans_are_cached_once_until_they_change() -> None:
    cache = Single()
    run = CachedRun(cache, TARGET)
    assert [run.store(*in_force(), int) for _ in range(2)] == [True, False]
    run.changed()
    assert run.store(*in_force(), int)
    assert len(cache) == 2 and cache[0].traces == (MODEL,)


def test_plans_that_were_found_are_not_cached_again() -> None:
    cache = Single()
    CachedRun(cache, TARGET).store(*in_force(), int)
    run, (plans, feedback) = CachedRun(cache, TARGET), in_force()
    assert run.find(MODEL, PCIE_GEN5, int) is cache[0] and not run.resumed
    run.begun(plans.plans, MODEL)
    assert run.resumed and not run.store(plans, feedback, int)


def test_plans_beside_others_or_above_the_budget_are_not_cached() -> None:
    cache = Single()
    run = CachedRun(cache, TARGET)
    assert not run.store(*in_force(PCIE_GEN5.reduced({"bus": 0.5})), int)
    plans, feedback = in_force()
    plans.planned = tuple(replace(each, least=True) for each in plans.planned)
    assert not run.store(plans, feedback, int) and not cache


def test_the_first_recorded_iteration_alone_verifies_what_was_found() -> None:
    run, (plans, _) = CachedRun(Single(), TARGET), in_force()
    bare = replace(MODEL, recipes={})
    assert any(plan.recompute for plan in plans.plans)
    assert run.verify(plans, bare, 0) == Verification(), "nothing was found"
    run.begun(plans.plans, bare)
    assert run.verify(plans, bare, 0) == Verification(differs=True, completes=True)
    assert run.verify(plans, bare, 0) == Verification(), "it was the second one"
    run.begun(plans.plans, MODEL)
    assert run.verify(plans, MODEL, TARGET) == Verification()
    run.begun(plans.plans, MODEL)
    assert run.verify(plans, MODEL, 2 * TARGET) == Verification(differs=True)


def test_an_iteration_that_is_much_quicker_than_what_was_found_has_all_learned_anew() -> None:
    """A host that was busy in the earlier run; one that is busy now tells nothing."""
    run, (plans, _) = CachedRun(Single(), TARGET), in_force()
    for pace, differs in (0.3, True), (0.9, False), (3.0, False):
        run.begun(plans.plans, MODEL)
        assert run.verify(plans, at_pace(MODEL, pace), TARGET).differs == differs
    run.begun(plans.plans, MODEL)
    shorter = replace(MODEL, sites=MODEL.sites[:-1])
    assert not run.verify(plans, at_pace(shorter, 0.3), TARGET).differs, "it is another iteration"


def test_an_iteration_of_another_kind_says_nothing_of_the_plans_but_that_trials_were_run() -> None:
    run, (plans, _) = CachedRun(Single(), TARGET), in_force()
    run.begun(plans.plans, replace(MODEL, recipes={}))
    other = replace(MODEL, sites=tuple(replace(site, key=f"other.{site.key}") for site in MODEL.sites))
    assert run.verify(plans, other, 2 * TARGET) == Verification(completes=True)
