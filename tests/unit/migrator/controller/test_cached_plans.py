"""What one run learned of a program, and the next begins with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.unit.learners import MODEL, Gives, peak_of
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.controller.cached_plans import CachedPlans, fingerprint
from torch_tiers.migrator.controller.learner import Learner
from torch_tiers.migrator.controller.outcome import IterationOutcome
from torch_tiers.migrator.model.links import PCIE_GEN5, Links
from torch_tiers.migrator.model.plan import NoPlanFits, Plan
from torch_tiers.migrator.model.timing import IterationTime
from torch_tiers.migrator.model.trace import Site, Trace
from torch_tiers.migrator.policies import POLICIES

TARGET = peak_of(MODEL) * 3 // 4
STATIC = min(MODEL.others)


class Kept:
    """A cache between two runs, through JSON as on a disk."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}

    def find(self, sites: Sequence[Site]) -> CachedPlans | None:
        content = self.files.get(fingerprint(sites))
        return None if content is None else CachedPlans.from_json(content)

    def store(self, plans: CachedPlans) -> None:
        self.files |= {fingerprint(trace.sites): plans.to_json() for trace in plans.traces}


def learner(cache: Kept, links: Links = PCIE_GEN5) -> Learner:
    return Learner(POLICIES["auto"], TARGET, links, plan_cache=cache)


def over(of: Learner, trace: Trace | None, *, whole: bool = True, static: int = STATIC, beyond: int = 0) -> bool:
    """An iteration as it was predicted."""
    (predicted,) = of.predictions or (None,)
    iteration_time = None if predicted is None else IterationTime(predicted.seconds, predicted.stalls)
    peak = 0 if predicted is None else predicted.peak["hbm"] + beyond
    return of.iteration_over(
        IterationOutcome(trace, peak, whole=whole, iteration_time=iteration_time, static=lambda: static)
    )


def run(cache: Kept, trace: Trace = MODEL, iterations: int = 20) -> Learner:
    """A run that records what it is asked to; what its optimizer makes is there from the second iteration on."""
    of = learner(cache)
    for iteration in range(iterations):
        over(of, trace if of.records_next else None, whole=iteration > 0)
    return of


@pytest.fixture
def cache() -> Kept:
    """What a first run leaves."""
    cache = Kept()
    run(cache)
    assert cache.files
    return cache


def test_a_program_begins_its_second_iteration_with_the_plans_of_its_last_run() -> None:
    cache = Kept()
    first = run(cache)
    assert cache.files
    again = learner(cache)
    assert over(again, MODEL, whole=False)
    assert [plan.to_json() for plan in again.plans] == [plan.to_json() for plan in first.plans]
    (now,), (before,) = again.predictions, first.predictions
    assert now is not None and before is not None and now.seconds == pytest.approx(before.seconds)


def test_those_plans_hold_as_long_as_they_mispredict_nothing(cache: Kept) -> None:
    again = learner(cache)
    changed = [over(again, MODEL if again.records_next else None, whole=iteration > 0) for iteration in range(30)]
    assert changed == [True] + [False] * 29
    assert again.settled and not again.records_next


def test_a_program_with_other_shapes_is_another(cache: Kept) -> None:
    larger = replace(MODEL, sites=tuple(replace(site, nbytes=2 * site.nbytes) for site in MODEL.sites), recipes={})
    assert not over(learner(cache), larger, whole=False)
    assert fingerprint(MODEL.sites) != fingerprint(MODEL.sites, "another GPU")


def test_a_run_that_saves_otherwise_after_all_learns_anew(cache: Kept) -> None:
    again = learner(cache)
    assert over(again, MODEL, whole=False)
    more = replace(MODEL, sites=(*MODEL.sites, Site("new:0", 1 << 20, MiB, MODEL.sites[-1].birth, ())), recipes={})
    assert over(again, more)
    assert again.traces[-1].by_key.keys() == more.by_key.keys()


def test_a_program_with_another_optimizer_learns_anew(cache: Kept) -> None:
    """Its state may be of another size, so that the plan does not fit."""
    assert not over(learner(cache), MODEL, whole=False, static=STATIC + TARGET // 10)


def test_a_program_that_takes_more_memory_than_it_did_learns_anew(cache: Kept) -> None:
    for beyond in (0, TARGET // 2):
        again = Learner(POLICIES["auto"], TARGET, recordings=2, plan_cache=cache)
        assert over(again, MODEL, whole=False)
        over(again, MODEL, beyond=beyond)
        assert again.records_next == bool(beyond)


def test_what_cannot_be_recomputed_any_more_is_learned_anew() -> None:
    cache = Kept()
    first = run(cache)
    (plan,) = first.plans
    assert plan.recompute
    again, bare = learner(cache), replace(MODEL, recipes={})
    assert over(again, bare, whole=False)
    over(again, bare)
    assert not any(plan.recompute for plan in again.plans)


def test_what_is_seen_to_be_recomputed_later_is_carried_out_from_then_on(cache: Kept) -> None:
    again = learner(cache)
    assert over(again, replace(MODEL, recipes={}), whole=False)
    assert over(again, MODEL), "those who carry it out are to look again"


@pytest.mark.parametrize(
    "links",
    [
        replace(PCIE_GEN5, d2h=PCIE_GEN5.d2h / 2),
        replace(PCIE_GEN5, below=64 * MiB, dram=64 * MiB),
        replace(PCIE_GEN5, disk_read=3e9, disk_write=3e9),
    ],
)
def test_plans_for_other_links_or_tiers_are_no_use(cache: Kept, links: Links) -> None:
    other = learner(cache, links)
    assert not over(other, MODEL, whole=False) and not other.plans
    found = cache.find(MODEL.sites)
    assert found is not None
    assert found.holds_for(PCIE_GEN5, STATIC, 0) and not found.holds_for(links, STATIC, 0)


def test_a_plan_is_kept_with_what_it_was_made_for_alone() -> None:
    """One that could not be made for what was recorded since is no plan of that."""
    cache, fails = Kept(), [False]

    def policy(trace: Trace, budget: int, links: Links) -> Plan:
        if fails[0]:
            raise NoPlanFits(budget, 2 * budget, "all")
        return POLICIES["auto"](trace, budget, links)

    of = Learner(policy, TARGET, plan_cache=cache)
    over(of, MODEL)
    fails[0] = True
    for _ in range(5):
        of.iteration_over(IterationOutcome(None, TARGET, mispredicted=True, static=lambda: STATIC))
    larger = replace(MODEL, sites=tuple(replace(site, nbytes=site.nbytes + 512) for site in MODEL.sites), recipes={})
    while of.records_next:
        over(of, larger)
    for _ in range(40):
        over(of, None)
    assert cache.find(larger.sites) is None


def test_what_was_not_borne_out_is_not_kept() -> None:
    cache = Kept()
    run(cache, iterations=4)
    assert not cache.files


def test_what_was_found_beside_others_is_not_kept() -> None:
    cache = Kept()
    of = learner(cache)
    over(of, MODEL)
    of.relink(PCIE_GEN5.reduced({"bus": 0.5}))
    for _ in range(20):
        over(of, None)
    assert not cache.files


@pytest.mark.parametrize(
    "damage",
    [lambda text: text[: len(text) // 2], lambda text: text.replace('"format"', '"other"', 1), lambda _: "[]"],
)
def test_what_is_damaged_is_refused(cache: Kept, damage: object) -> None:
    (content,) = cache.files.values()
    with pytest.raises(ValueError):
        CachedPlans.from_json(damage(content))  # type: ignore[operator]


def test_a_plan_for_drives_is_not_begun_with_where_there_are_none(cache: Kept) -> None:
    (content,) = cache.files.values()
    found = CachedPlans.from_json(content)
    assert any(plan.groups for plan in found.plans) and found.holds_for(PCIE_GEN5, STATIC, 0)
    to_drives = [
        replace(plan, groups=tuple(replace(group, tier="nvme") for group in plan.groups)) for plan in found.plans
    ]
    assert not replace(found, plans=tuple(to_drives)).holds_for(PCIE_GEN5, STATIC, 0)


def test_a_run_that_begins_with_plans_for_which_room_was_made_has_it_made_at_once() -> None:
    cache, asked = Kept(), list[int]()
    target = max(MODEL.others) // 2
    smaller = replace(MODEL, others=tuple(each // 16 for each in MODEL.others))

    def begin() -> Learner:
        return Learner(POLICIES["auto"], target, plan_cache=cache, must_fit=False, relief=Gives(asked))

    first = begin()
    over(first, MODEL)
    (lacks,) = asked
    over(first, None)
    for _ in range(20):
        over(first, smaller if first.records_next else None)
    assert cache.files
    second = begin()
    over(second, MODEL, static=STATIC)
    assert asked == [lacks, lacks]
    assert second.plans[0].is_the_same_as(first.plans[0])
