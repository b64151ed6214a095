from __future__ import annotations

import json
from dataclasses import asdict
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.modelled import gpt
from tests.unit.traces import chain, traces
from torch_tiers.allocator.sizes import GiB, MiB
from torch_tiers.migrator.model.plan import Keep, NoPlanFits, Plan
from torch_tiers.migrator.model.trace import Site, Trace
from torch_tiers.migrator.planner.build import make_plan
from torch_tiers.migrator.planner.schedule import fit
from torch_tiers.migrator.planner.sizes import group_bytes, look_ahead

ROOMS = st.integers(0, 4 * GiB)


def some_plan(trace: Trace, room: int, rng: Random) -> Plan:
    return make_plan("test", trace, {life.ident for life in trace.lifetimes if rng.random() < 0.5}, room)


@given(traces(), ROOMS, st.randoms())
def test_every_site_has_one_place_and_what_enters_hbm_leaves_it_once_used(trace: Trace, room: int, rng: Random) -> None:
    plan = some_plan(trace, room, rng)
    placed = [*plan.keep, *(key for group in plan.groups for key in group.sites)]
    assert sorted(placed) == sorted(site.key for site in trace.sites)
    assert plan.kept_bytes + plan.moved_bytes == trace.saved_bytes
    kept = {site.storage for site in trace.sites if site.key in plan.keep}
    unused = sum(life.nbytes for life in trace.lifetimes if life.ident in kept and not life.uses)
    assert plan.kept_bytes - sum(keep.leave for keep in plan.keep.values()) == unused


@given(traces(), ROOMS, st.randoms())
def test_a_group_is_complete_after_its_last_birth_and_needed_at_its_first_use(
    trace: Trace, room: int, rng: Random
) -> None:
    sites = {site.key: site for site in trace.sites}
    for group in some_plan(trace, room, rng).groups:
        members = [sites[key] for key in group.sites]
        assert group.last_birth == max(site.birth for site in members)
        assert group.first_use == min((use for site in members for use in site.uses), default=None)


def test_a_group_waits_for_what_a_residual_block_saves_again_at_its_end() -> None:
    # The shortcut saves the block's input a second time. A group that ends in between must not look like a later one:
    # the first was offloaded without that save, and then never complete, in every iteration.
    first, last = Site("conv:0", 0, 80 * MiB, 0, (5,)), Site("cut:0", 0, 80 * MiB, 2, (3,))
    trace = Trace((first, Site("bn:0", 1, 80 * MiB, 1, (4,)), last), positions=6)
    groups = make_plan("test", trace, range(2), 0).groups
    assert [(group.sites, group.last_birth) for group in groups] == [(("bn:0",), 1), (("conv:0", "cut:0"), 2)]


@given(st.lists(st.sampled_from([1, MiB, 80 * MiB]), max_size=12), ROOMS)
def test_groups_are_in_the_order_in_which_they_are_needed(sizes: list[int], room: int) -> None:
    trace = chain(sizes)
    plan = make_plan("test", trace, range(len(sizes)), room)
    needed = [group.first_use or 0 for group in plan.groups]
    assert needed == sorted(needed)


def test_a_shared_storage_enters_with_its_first_site_and_leaves_with_the_last_use() -> None:
    trace = Trace((Site("a:0", 0, 64, 0, (3,)), Site("b:0", 0, 64, 1, (2,))), positions=4)
    assert make_plan("test", trace, (), 0).keep == {"a:0": Keep(64, 64), "b:0": Keep(0, 0)}


def test_what_cannot_move_is_kept_at_no_cost() -> None:
    trace = Trace((Site("a:0", 0, 0, 0, (1,)),), positions=2)
    assert make_plan("test", trace, (), 0).keep == {"a:0": Keep(0, 0)}


def test_a_group_is_a_sixteenth_of_the_room_within_bounds() -> None:
    assert [group_bytes(room) for room in (0, 64 * MiB, 64 * GiB)] == [2 * MiB, 4 * MiB, 192 * MiB]


def test_the_look_ahead_holds_two_of_the_largest_groups() -> None:
    assert look_ahead(0, GiB) == 0, "nothing moves"
    assert (look_ahead(1, 64 * MiB), look_ahead(100 * MiB, 64 * MiB)) == (8 * MiB, 200 * MiB)


@given(traces(), ROOMS, st.randoms())
def test_json_holds_the_whole_plan(trace: Trace, room: int, rng: Random) -> None:
    plan = some_plan(trace, room, rng)
    data = json.loads(plan.to_json())
    assert (data["policy"], data["room"]) == (plan.policy, plan.room)
    assert data["keep"] == {key: {"enter": keep.enter, "leave": keep.leave} for key, keep in plan.keep.items()}
    assert [group["sites"] for group in data["groups"]] == [list(group.sites) for group in plan.groups]


def test_what_is_never_used_has_no_first_use() -> None:
    trace = Trace((Site("a:0", 0, 64, 0, ()),), positions=1)
    assert [group.first_use for group in make_plan("test", trace, {0}, 0).groups] == [None]


def test_a_group_takes_whole_pages_below_hbm() -> None:
    assert make_plan("test", chain([1, 3 * MiB]), {0, 1}, 0).stored_bytes == 6 * MiB


def test_the_room_is_never_less_than_the_largest_group() -> None:
    assert make_plan("test", chain([1, 9 * MiB]), {0, 1}, 0).room == 9 * MiB
    assert make_plan("test", chain([1, 9 * MiB]), {0, 1}, 20 * MiB).room == 20 * MiB
    assert make_plan("test", chain([1, 9 * MiB]), (), 0).room == 0


@given(traces(), ROOMS, st.randoms())
def test_json_keeps_everything(trace: Trace, room: int, rng: Random) -> None:
    plan = some_plan(trace, room, rng)
    again = Plan.from_json(plan.to_json())
    assert asdict(again) == asdict(plan)


def test_json_keeps_what_is_recomputed_and_the_limits() -> None:
    trace = gpt(blocks=2)
    made = [*trace.recipes][-4:]
    plan = fit("test", trace, 9 * GiB, [life.ident for life in trace.lifetimes][:9], dropped=made)
    assert plan.limits and plan.recompute
    assert asdict(Plan.from_json(plan.to_json())) == asdict(plan)


def test_a_budget_that_is_too_small_is_told_in_terms_of_what_it_is_a_part_of() -> None:
    error = NoPlanFits(95, 190, "0 B of saved tensors and 190 B of all else after a:0").out_of(100)
    assert (error.budget, error.smallest) == (100, 200)


def test_where_most_of_the_budget_is_something_else_s_that_is_needed_besides() -> None:
    """Such as at a first peak that leaves saved tensors no room at all."""
    for part in (0, 1):
        error = NoPlanFits(part, 2 * GiB, "all").out_of(8 * GiB)
        assert error.smallest == 10 * GiB - part
        assert "it needs 10.0 GiB" in str(error)
