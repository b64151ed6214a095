from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.traces import chain, traces
from torch_tiers.allocator.layout.groups import group_by_death
from torch_tiers.allocator.layout.lifetimes import Lifetime
from torch_tiers.migrator.model.trace import Trace

LIMITS = st.integers(1, 1 << 29)


def test_neighbours_in_death_travel_together() -> None:
    groups = group_by_death(chain([3, 3, 3, 3]).lifetimes, group_bytes=6)
    assert [[life.ident for life in group] for group in groups] == [[3, 2], [1, 0]]


def test_a_storage_above_the_limit_travels_alone() -> None:
    groups = group_by_death(chain([1, 9, 1]).lifetimes, group_bytes=6)
    assert [[life.ident for life in group] for group in groups] == [[2], [1], [0]]


def test_what_is_never_used_travels_apart_and_comes_last() -> None:
    lives = [Lifetime(0, 1, 0, ()), Lifetime(1, 1, 1, (2,)), Lifetime(2, 1, 1, ())]
    groups = group_by_death(lives, group_bytes=10)
    assert [{life.ident for life in group} for group in groups] == [{1}, {0, 2}]


@given(traces(), LIMITS)
def test_every_storage_is_in_one_group(trace: Trace, limit: int) -> None:
    grouped = [life for group in group_by_death(trace.lifetimes, limit) for life in group]
    assert sorted(life.ident for life in grouped) == sorted(life.ident for life in trace.lifetimes)


@given(traces(), LIMITS)
def test_only_a_single_storage_exceeds_the_limit(trace: Trace, limit: int) -> None:
    for group in group_by_death(trace.lifetimes, limit):
        assert len(group) == 1 or sum(life.nbytes for life in group) <= limit


@given(traces(), LIMITS)
def test_groups_follow_the_order_of_deaths(trace: Trace, limit: int) -> None:
    flat = [life for group in group_by_death(trace.lifetimes, limit) for life in group]
    used = [life.death for life in flat if life.uses]
    assert used == sorted(used)
    assert all(life.uses for life in flat[: len(used)])


@given(traces(), LIMITS, st.randoms())
def test_the_order_of_arrival_does_not_matter(trace: Trace, limit: int, rng: Random) -> None:
    lives = list(trace.lifetimes)
    expected = group_by_death(lives, limit)
    rng.shuffle(lives)
    assert group_by_death(lives, limit) == expected
