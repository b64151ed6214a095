from __future__ import annotations

import itertools
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.runtime.backoff import FLOOR, GROUPS, LEAST_GROUPS, WARY, Backoff, Response, Verdict

FREE = Verdict()
BUSY = Verdict("saturated", "others", {"d2h": 0.8, "h2d": 0.7}, 0.7)
OURS = Verdict("saturated", "us", {"d2h": 1.0, "h2d": 1.0}, 1.0)
UNKNOWN = Verdict("saturated", "unknown", {"d2h": 0.8, "h2d": 0.7}, 0.7)
RECOVERING = Verdict("recovering", "others", {"d2h": 0.95, "h2d": 0.95}, 0.95)
VERDICTS = st.sampled_from([FREE, BUSY, OURS, UNKNOWN, RECOVERING])


def after(verdicts: Iterable[Verdict], backoff: Backoff | None = None) -> list[Backoff]:
    """The states that lead there, the first one included."""
    states = [backoff or Backoff()]
    for verdict in verdicts:
        states.append(states[-1].step(verdict))
    return states


def reversals(shares: Iterable[float]) -> int:
    """How often the share changes its direction."""
    shares = list(shares)
    moves = [now > before for before, now in itertools.pairwise(shares) if now != before]
    return sum(now != before for before, now in itertools.pairwise(moves))


def test_while_the_bus_is_free_nothing_is_held_back() -> None:
    assert all(state.response == Response() for state in after([FREE] * 50))


def test_a_saturated_step_halves_the_share_and_that_has_time_to_show_before_the_next() -> None:
    assert [state.share for state in after([BUSY] * 8)] == [1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.25]


def test_groups_come_back_just_in_time_before_plans_change() -> None:
    """A part of the bus is always left, so that copies tell when it is free."""
    states = after([BUSY] * 1000)
    assert states[1].response == Response(GROUPS, {})
    assert states[4].share == states[-1].share == FLOOR
    assert states[4].response == Response(LEAST_GROUPS, {"d2h": 0.8, "h2d": 0.7, "bus": 0.7})


def test_plans_change_for_workers_that_leave_the_lanes_as_they_are() -> None:
    workers = Verdict("saturated", "workers", {"d2h": 1.0, "h2d": 1.0}, 1.0)
    assert after([workers] * 7)[-1].response.left == {"d2h": 1.0, "h2d": 1.0, "bus": 1.0}


def test_plans_are_made_once_unless_much_less_is_left() -> None:
    """A number that trembles must not have everything planned anew."""
    backoff = after([BUSY] * 7)[-1]
    trembling = Verdict("saturated", "others", {"d2h": 0.75, "h2d": 0.65}, 0.65)
    assert backoff.step(trembling).left == backoff.left
    worse = Verdict("saturated", "others", {"d2h": 0.75, "h2d": 0.4}, 0.4)
    assert backoff.step(worse).left == {"d2h": 0.75, "h2d": 0.4, "bus": 0.4}


def test_the_grades_are_undone_in_the_other_order_and_memory_is_asked_for_in_another_one_twice() -> None:
    """Each time the allocator's layout fits no more: with a grade for every share five steps flushed, one by one."""
    states = after([FREE] * 30, after([BUSY] * 20)[-1])
    planned = [bool(state.left) for state in states]
    held = [state.response.ahead is not None for state in states]
    assert planned.index(False) < held.index(False)
    assert states[-1].response == Response()
    ahead = [state.response.ahead for state in states]
    assert [of for of, _ in itertools.groupby(ahead)] == [LEAST_GROUPS, GROUPS, None]


def test_the_share_grows_by_as_much_every_step() -> None:
    states = after([FREE] * 20, after([BUSY] * 20)[-1])
    growth = {round(now.share - before.share, 6) for before, now in itertools.pairwise(states)}
    assert growth == {0.125, 0.0}
    assert states[7].share == 1


def test_recovering_is_waited_out() -> None:
    backoff = after([BUSY] * 4)[-1]
    assert {state.share for state in after([RECOVERING] * 50, backoff)} == {backoff.share}


def test_what_we_do_to_ourselves_is_no_reason_to_make_room() -> None:
    assert all(state.response == Response() for state in after([OURS] * 100))


def test_for_who_is_unknown_room_is_made_as_for_others() -> None:
    assert after([UNKNOWN] * 20) == after([BUSY] * 20)


def test_after_a_recovery_that_failed_the_next_waits() -> None:
    failed = after([BUSY] * 9 + [FREE] * 5 + [BUSY] * 9)[-1]
    waiting = after([FREE] * 200, failed)
    assert {state.share for state in waiting[: WARY + 1]} == {failed.share}
    assert waiting[WARY + 1].share > failed.share
    assert waiting[-1] == Backoff(calm=200)


def test_a_recovery_that_lasted_is_forgotten() -> None:
    states = after([BUSY] * 9 + [FREE] * 100 + [BUSY] * 9 + [FREE])
    assert states[-1].share > states[-2].share


@given(st.lists(VERDICTS, max_size=200), VERDICTS)
def test_under_a_constant_load_there_is_at_most_one_reversal(before: list[Verdict], load: Verdict) -> None:
    states = after([load] * 100, after(before)[-1])
    assert reversals([*(state.share for state in after(before)[-2:]), *(state.share for state in states)]) <= 1


@given(st.lists(VERDICTS, max_size=300))
def test_it_always_comes_back(before: list[Verdict]) -> None:
    states = after([FREE] * 115, after(before)[-1])
    assert states[-1].response == Response()
    assert all(FLOOR <= state.share <= 1 for state in after(before))


# ---------------------------------------------------------------------------------------- what plans are made with

LINKS = Links(d2h=50e9, h2d=40e9, both=80e9, disk_write=3e9, disk_read=2e9, gds_write=2.5e9, gds_read=4e9)


def test_links_are_reduced_to_what_is_left_but_for_drives_past_host_memory() -> None:
    left = LINKS.reduced({"d2h": 0.5, "h2d": 0.75, "bus": 0.5})
    assert (left.d2h, left.h2d, left.both, left.contended) == (25e9, 30e9, 50e9, True)
    assert (left.gds_write, left.gds_read) == (2.5e9, 4e9)
    assert (left.disk_write, left.disk_read) == (1.5e9, 1e9), "drives behind host memory are no way out"
    assert left.alone == LINKS
    assert LINKS.reduced({}) is LINKS
