from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.sizes import GiB, MiB
from migrator.links import PCIE_GEN5
from migrator.plan import NoPlanFits, Plan, look_ahead
from migrator.policies import POLICIES
from migrator.simulator import simulate
from migrator.trace import Site, Trace
from tests.unit.traces import chain, programs, traces

ROOMS = st.integers(0, 2 * GiB)
flashneuron, keep, move = (partial(POLICIES[name], links=PCIE_GEN5) for name in ("flashneuron", "keep", "move"))


def test_flashneuron_by_hand() -> None:
    """FAST'21, phase 1: select in creation order until what is not selected fits.

    Nine storages, 48 MiB, into 40 MiB of room; a group is 40/16 = 2.5 MiB. The room must also hold two of
    the largest groups as soon as anything moves::

        moved     stays  largest group  stays + 2 groups
        -           48       -            48   > 40
        a  4        44       4            52   > 40
        b  4        40       4            48   > 40
        c  1        39       4            47   > 40
        d  1        38       4            46   > 40
        e  6        32       6            44   > 40
        f  4        28       6            40  <= 40, enough

    Backward asks for f first. Only c and d are small enough to share a group.
    """
    trace = chain([n * MiB for n in (4, 4, 1, 1, 6, 4, 4, 8, 16)])
    plan = flashneuron(trace, 40 * MiB)
    assert [group.sites for group in plan.groups] == [
        ("layer5:0",), ("layer4:0",), ("layer3:0", "layer2:0"), ("layer1:0",), ("layer0:0",),
    ]  # fmt: skip
    assert sorted(plan.keep) == ["layer6:0", "layer7:0", "layer8:0"]
    assert (plan.moved_bytes, plan.kept_bytes, plan.room) == (20 * MiB, 28 * MiB, 40 * MiB)


def test_flashneuron_moves_nothing_that_fits() -> None:
    assert flashneuron(chain([MiB] * 40), 40 * MiB).groups == ()


@given(traces(), ROOMS)
def test_flashneuron_keeps_within_the_room_or_moves_everything(trace: Trace, room: int) -> None:
    plan = flashneuron(trace, room)
    ahead = look_ahead(max((group.nbytes for group in plan.groups), default=0), room)
    assert plan.kept_bytes + ahead <= room or plan.kept_bytes == 0


@given(traces(), ROOMS)
def test_flashneuron_moves_the_oldest(trace: Trace, room: int) -> None:
    stays = set(flashneuron(trace, room).keep)
    moves = [
        not any(site.key in stays for site in trace.sites if site.storage == life.ident) for life in trace.lifetimes
    ]
    assert moves == sorted(moves, reverse=True)


def test_what_else_lies_in_hbm_comes_off_the_budget() -> None:
    trace = chain([n * MiB for n in (4, 4, 1, 1, 6, 4, 4, 8, 16)])
    crowded = replace(trace, others=(*[0] * 17, 90 * MiB, 10 * MiB))
    assert flashneuron(crowded, 130 * MiB).keep == flashneuron(trace, 40 * MiB).keep


@given(traces(), ROOMS)
def test_keep_moves_nothing_and_has_room_for_it(trace: Trace, room: int) -> None:
    plan = keep(trace, room)
    assert plan.groups == ()
    assert plan.room >= plan.kept_bytes == trace.saved_bytes


@given(traces(), ROOMS)
def test_move_keeps_nothing_and_takes_no_more_than_it_must(trace: Trace, room: int) -> None:
    plan = move(trace, room)
    assert plan.kept_bytes == 0
    assert plan.moved_bytes == trace.saved_bytes
    assert plan.room <= max(room, look_ahead(max((life.nbytes for life in trace.lifetimes), default=0), room))


@pytest.mark.parametrize("name", POLICIES)
@given(trace=traces(), room=ROOMS)
def test_a_policy_always_decides_the_same(name: str, trace: Trace, room: int) -> None:
    again = Trace.from_json(trace.to_json())
    assert POLICIES[name](trace, room, PCIE_GEN5).to_json() == POLICIES[name](again, room, PCIE_GEN5).to_json()


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40)
@given(trace=programs(), budget=ROOMS)
def test_a_policy_gives_every_storage_one_place(name: str, trace: Trace, budget: int) -> None:
    plan = planned(name, trace, budget)
    if plan is None:
        return
    inside = {key for region in trace.regions if region.path in plan.regions for key in _keys(trace.sites_of(region))}
    moved = {key for group in plan.groups for key in group.sites}
    places = [set(plan.keep), moved, set(plan.recompute), inside]
    assert sum(map(len, places)) == len(set().union(*places))
    assert {site.key for site in trace.sites} <= set().union(*places)
    for life in trace.lifetimes:
        keys = {site.key for site in trace.sites if site.storage == life.ident} - inside
        assert sum(bool(keys & place) for place in places) == bool(keys)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40)
@given(trace=programs(), budget=ROOMS)
def test_a_policy_uses_nothing_that_is_away_and_overbooks_no_lane(name: str, trace: Trace, budget: int) -> None:
    plan = planned(name, trace, budget)
    if plan is None:
        return
    result = simulate(trace, PCIE_GEN5, plan)
    for begin in (0, 2):
        spans = sorted((move[begin], move[begin + 1]) for move in result.moves if move[begin + 1])
        assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(spans))
    for group, (_, out, begins, home) in zip(plan.groups, result.moves, strict=True):
        if home:
            uses = [use for key in group.sites if key in trace.by_key for use in trace.by_key[key].uses]
            assert out <= begins
            assert all(result.clock[use] >= home - 1e-12 for use in uses)


def planned(name: str, trace: Trace, budget: int) -> Plan | None:
    try:
        return POLICIES[name](trace, budget, PCIE_GEN5)
    except NoPlanFits:
        return None


def _keys(sites: Iterable[Site]) -> set[str]:
    return {site.key for site in sites}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_signs_its_plans(name: str) -> None:
    assert POLICIES[name](chain([MiB]), 0, PCIE_GEN5).policy == name
