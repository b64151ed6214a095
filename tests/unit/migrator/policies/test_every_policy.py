from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.quick import quickest
from tests.unit.samples import SAMPLES
from tests.unit.traces import chain, programs, traces
from torch_tiers.allocator.sizes import GiB, MiB
from torch_tiers.migrator.model import trace_json
from torch_tiers.migrator.model.links import PCIE_GEN5, Links
from torch_tiers.migrator.model.plan import NoPlanFits, Plan
from torch_tiers.migrator.model.trace import Recipe, Trace
from torch_tiers.migrator.planner.effects import effect
from torch_tiers.migrator.policies import POLICIES, autotm, swapadvisor
from torch_tiers.migrator.simulator import Simulated, simulate

WITH_DISK = replace(PCIE_GEN5, disk_write=2.9e9, disk_read=2.9e9)
PAST_THE_HOST = WITH_DISK.with_direct_way(0.0, 0.0)
FAST_PAST_THE_HOST = WITH_DISK.with_direct_way(24e9, 48e9)
LINKS = st.sampled_from([PCIE_GEN5, WITH_DISK, PAST_THE_HOST, FAST_PAST_THE_HOST])
BUDGETS = st.integers(0, 2 * GiB)
ALL = pytest.mark.parametrize("name", POLICIES)
BOUND = sorted(
    {*POLICIES} - {"keep", "move", "checkpoint", "flashneuron", "vdnn++", "vdnn-all", "vdnn-conv", "vdnn-dyn"}
)
"""Policies whose plans fit any budget that moving or recomputing everything fits; the others do what they do."""


def planned(name: str, trace: Trace, budget: int, links: Links) -> Plan:
    """What the policy plans; `auto` refuses a budget that no plan meets, and is asked again with one that some does."""
    try:
        return POLICIES[name](trace, budget, links)
    except NoPlanFits as refused:
        return POLICIES[name](trace, refused.smallest, links)


def placed(plan: Plan) -> list[str]:
    return [*plan.keep, *(key for group in plan.groups for key in group.sites), *plan.recompute]


def decisions(plan: Plan) -> object:
    """All that a plan says but who says it."""
    return {name: value for name, value in json.loads(plan.to_json()).items() if name != "policy"}


def peak(trace: Trace) -> int:
    return simulate(trace, PCIE_GEN5, POLICIES["keep"](trace, 2**62, PCIE_GEN5)).peak["hbm"]


def budget_for(trace: Trace, part: float) -> int:
    """What else lies in HBM, and `part` of what saved tensors add to it at the peak."""
    least = max(trace.others)
    return int(least + part * (peak(trace) - least))


@cache
def sampled(sample: str) -> Trace:
    return SAMPLES[sample]()


@cache
def within(name: str, sample: str, part: float) -> Plan:
    """What the policy plans for that part of a sample's memory: several tests look at the same."""
    trace = sampled(sample)
    return POLICIES[name](trace, budget_for(trace, part), PCIE_GEN5)


def every_site_and_every_storage_has_one_place(trace: Trace, plan: Plan) -> None:
    assert sorted(placed(plan)) == sorted(site.key for site in trace.sites)
    places = [{*plan.keep}, {key for group in plan.groups for key in group.sites}, {*plan.recompute}]
    for life in trace.lifetimes:
        keys = {site.key for site in trace.sites if site.storage == life.ident}
        assert sum(bool(keys & place) for place in places) == bool(keys)


def what_is_recomputed_is_made_from_what_is_there(trace: Trace, plan: Plan) -> None:
    dropped = {trace.by_key[key].storage for key in plan.recompute}
    outcome = effect(trace, dropped)  # raises where something is not obtainable
    sources = {source for ident in dropped for source in trace.recipes[ident].inputs}
    assert sources <= {*outcome.held, *dropped}


def groups_come_back_by_their_first_use_to_a_tier_that_exists(plan: Plan, links: Links) -> None:
    for group in plan.groups:
        assert group.tier in (("dram", "nvme", None) if links.has_drive else ("dram", None))
        assert group.bring_at is None or group.first_use is None or 0 <= group.bring_at <= group.first_use


def nothing_is_used_while_it_is_away(trace: Trace, plan: Plan, result: Simulated) -> None:
    for group, (_, out, begins, home) in zip(plan.groups, result.moves, strict=True):
        if home:
            members = [trace.by_key[key] for key in group.sites if key in trace.by_key]
            # What is used while its group fills, of which some is saved later, has not left.
            uses = [use for site in members for use in site.uses if use > group.last_birth]
            assert out <= begins
            assert all(result.clock[use] >= home - 1e-12 for use in uses)


def no_lane_is_overbooked(plan: Plan, links: Links, result: Simulated) -> None:
    for direction, begin in ((0, 0), (1, 2)):
        spans: dict[str, list[tuple[float, float]]] = {}
        for group, move in zip(plan.groups, result.moves, strict=True):
            way = links.ways(group.tier)[direction]
            if len(way) == 1 and move[begin + 1]:  # nobody tells when a move of two lanes is on which
                spans.setdefault(way[0], []).append((move[begin], move[begin + 1]))
        for lane in spans.values():
            assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(sorted(lane)))


@ALL
@settings(max_examples=50)
@given(trace=st.one_of(traces(), programs()), budget=BUDGETS, links=LINKS)
@example(trace=Trace((), 0), budget=MiB, links=PCIE_GEN5)  # which saves nothing
def test_every_plan_is_sound_and_signed(name: str, trace: Trace, budget: int, links: Links) -> None:
    plan = planned(name, trace, budget, links)
    assert plan.policy == name
    result = simulate(trace, links, plan)
    every_site_and_every_storage_has_one_place(trace, plan)
    what_is_recomputed_is_made_from_what_is_there(trace, plan)
    groups_come_back_by_their_first_use_to_a_tier_that_exists(plan, links)
    nothing_is_used_while_it_is_away(trace, plan, result)
    no_lane_is_overbooked(plan, links, result)


@ALL
@settings(max_examples=15)
@given(trace=programs(), budget=BUDGETS, links=LINKS)
def test_a_plan_is_the_same_for_the_same_trace(name: str, trace: Trace, budget: int, links: Links) -> None:
    again = trace_json.read(trace_json.write(trace))
    assert planned(name, again, budget, links).to_json() == planned(name, trace, budget, links).to_json()


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("name", BOUND)
def test_plans_fit_the_budget(name: str, sample: str) -> None:
    trace = sampled(sample)
    for part in (0.7, 0.4):
        held = simulate(trace, PCIE_GEN5, within(name, sample, part)).peak["hbm"]
        assert held <= 1.01 * budget_for(trace, part)


@pytest.mark.parametrize("name", sorted({*BOUND, "checkpoint", "flashneuron", "vdnn++", "vdnn-dyn"} - {"ssdtrain"}))
def test_nothing_moves_and_nothing_is_recomputed_where_all_fits(name: str) -> None:
    trace = SAMPLES["gpt"]()
    plan = POLICIES[name](trace, int(1.02 * peak(trace)), PCIE_GEN5)
    assert (plan.groups, plan.recompute) == ((), ())


def test_no_two_policies_decide_the_same_everywhere() -> None:
    undecided = set(combinations(POLICIES, 2))
    for sample in SAMPLES:
        decided = {name: decisions(within(name, sample, 0.7)) for name in {name for pair in undecided for name in pair}}
        undecided = {(one, other) for one, other in undecided if decided[one] == decided[other]}
    assert not undecided


@pytest.mark.parametrize("search", [autotm.plan, swapadvisor.plan])
def test_a_search_without_time_returns_what_it_has(search) -> None:  # type: ignore[no-untyped-def]
    trace = SAMPLES["gpt"]()
    budget = budget_for(trace, 0.7)
    plan = search(trace, budget, PCIE_GEN5, seconds=0.0)
    assert sorted(placed(plan)) == sorted(site.key for site in trace.sites)
    assert simulate(trace, PCIE_GEN5, plan).peak["hbm"] <= 1.01 * budget


def test_a_search_plans_alike_for_one_seed_and_unlike_for_another() -> None:
    trace = SAMPLES["unet"]()
    budget = budget_for(trace, 0.6)
    plans = [swapadvisor.plan(trace, budget, PCIE_GEN5, seed=seed, seconds=60).to_json() for seed in (1, 1, 2, 3)]
    assert plans[0] == plans[1]
    assert len({*plans}) > 1


@pytest.mark.stress
@ALL
def test_ten_thousand_tensors_each_made_from_the_one_before_are_planned_in_thirty_seconds(name: str) -> None:
    """As in a deep chain of activation functions: every one can be dropped, or moved instead, one by one."""
    count = 10_000
    trace = replace(
        chain([64 * MiB] * count),
        times=tuple(1e-3 * (k + 1) for k in range(2 * count)),
        seconds=1e-3 * (2 * count + 1),
        others=(0,) * (2 * count + 1),
        recipes={k: Recipe("gelu", (k - 1,), 2e-4) for k in range(count) if k % 6},
    )
    assert quickest(lambda: POLICIES[name](trace, count * 64 * MiB * 3 // 10, PCIE_GEN5), within=30) < 30
