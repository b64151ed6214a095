"""Sequences of readings and what is made of them; a reading a step."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random

import pytest

from tests.unit.migrator.runtime.test_backoff import reversals
from torch_tiers.migrator.runtime.backoff import FLOOR, Backoff, Verdict
from torch_tiers.monitor.calibration import Calibration, curves_of, kind_of
from torch_tiers.monitor.sensors import Reading
from torch_tiers.monitor.verdict import BLIND, CALM, GAP, MIDDLING, STALE, Judge

RECORDED = Path(__file__).parents[1] / "data" / "contention_readings.json"
NOTHING: dict[str, float] = {}


def verdicts(readings: Iterable[Reading], calibration: Calibration | None = None) -> Iterator[Verdict]:
    """The verdict after each reading."""
    judge = Judge(calibration)
    return (judge.judge(reading) for reading in readings)


def readings(values: Iterable[dict[str, float]], start: float = 100.0) -> list[Reading]:
    return [Reading(start + k, value) for k, value in enumerate(values)]


def lanes(parts: Iterable[float]) -> list[Reading]:
    """Both lanes give the same part."""
    return readings({"d2h": part, "h2d": part, "d2h.alone": part, "h2d.alone": part} for part in parts)


def states(parts: Iterable[float]) -> list[str]:
    return [verdict.state for verdict in verdicts(lanes(parts))]


def judged(given: Sequence[Reading], calibration: Calibration | None = None) -> Verdict:
    return list(verdicts(given, calibration))[-1]


def shares(given: Iterable[Reading]) -> list[float]:
    """The back-off's share after every reading."""
    backoff, found = Backoff(), []
    for verdict in verdicts(given):
        backoff = backoff.step(verdict)
        found.append(backoff.share)
    return found


# ------------------------------------------------------------------------------------------------- sequences


def test_a_quiet_bus_is_free() -> None:
    assert judged(lanes([1.0] * 20)) == Verdict("free", "nobody", {"d2h": 1.0, "h2d": 1.0}, 1.0)


@pytest.mark.parametrize("left", [0.83, 0.71, 0.5, 0.1, 0.0])
def test_a_step_is_seen_after_three_readings(left: float) -> None:
    """0.71 is what 14 copying processes left of H2D on an H100."""
    found = states([1.0] * 10 + [left] * 10)
    assert found[:11] == ["free"] * 11
    assert found[12:] == ["saturated"] * 8


def test_the_end_of_a_step_is_recovering_first_and_then_free() -> None:
    found = states([0.7] * 20 + [1.0] * 20)[20:]
    order = [state for state, before in zip(found, ["", *found], strict=False) if state != before]
    assert order == ["saturated", "recovering", "free"]
    assert found.count("recovering") == CALM - 1
    assert found.index("free") < 15


def test_a_ramp_is_seen_once_on_its_way_down_and_once_on_its_way_up() -> None:
    down = [1 - k / 100 for k in range(51)]
    found = states(down + down[::-1] + [1.0] * 20)
    changes = sum(now != before for before, now in itertools.pairwise(found))
    assert changes == 3
    assert found[51] == "saturated"


def test_a_single_reading_that_is_off_changes_nothing() -> None:
    assert set(states(([1.0] * 5 + [0.1]) * 20)) == {"free"}


def test_bursts_do_not_make_the_share_swing() -> None:
    """10 steps of load, 10 without, over and over: it stays low, for the bus is never free for long."""
    found = shares(lanes(([0.6] * 10 + [1.0] * 10) * 20))
    assert max(found[30:]) <= 0.25
    assert reversals(found) <= 2


@pytest.mark.parametrize("left", [1.0, 0.89, 0.7, 0.4])
def test_under_noise_a_constant_load_is_one_verdict(left: float, seed: int) -> None:
    random = Random(seed)
    found = shares(lanes(left + random.gauss(0, 0.02) for _ in range(2000)))
    assert all(reversals(found[k : k + 100]) <= 1 for k in range(len(found) - 100))
    # 0.89 lies between the thresholds: once in some thousand readings noise crosses the lower one, for a hundred steps.
    assert found.count(1.0 if left > 0.85 else FLOOR) >= 0.8 * len(found)


def test_between_the_thresholds_the_verdict_stays() -> None:
    assert set(states([0.89] * 100)) == {"free"}
    assert set(states([0.7] * 10 + [0.89] * MIDDLING)[5:]) == {"saturated"}


def test_what_stays_between_the_thresholds_is_what_the_lane_gives_now() -> None:
    """Another plan has other copies; that must not hold the runtime back for good."""
    assert states([0.7] * 10 + [0.89] * (MIDDLING + CALM + 5))[-1] == "free"


def test_a_lane_is_judged_for_itself() -> None:
    verdict = judged(readings([{"d2h": 1.0, "h2d": 0.6}] * 20))
    assert (verdict.state, verdict.cause) == ("saturated", "unknown")
    assert verdict.left["d2h"] == pytest.approx(1.0)
    assert verdict.left["h2d"] == pytest.approx(0.6, abs=0.01)
    assert verdict.bus == verdict.left["h2d"]


@pytest.mark.parametrize("left", [0.3, 0.6, 0.8])
def test_of_a_slow_lane_beside_a_fast_copy_nothing_is_said(left: float) -> None:
    """Another rank shares its link, or a host that is late its times: two ranks of FSDP2 were told of a busy bus."""
    lane = {"d2h": left, "h2d": 1.0}
    verdict = judged(readings([lane | {"copy": 0.99}] * 100))
    assert (verdict.state, verdict.cause, verdict.bus) == ("free", "nobody", pytest.approx(0.99, abs=0.02))
    assert judged(readings([lane | {"copy": 0.7}] * 100)).state == "saturated"
    assert judged(readings([lane] * 20 + [lane | {"copy": 1.0}] * 100)).state == "free"
    tireless = lane | {"copy": 1.0, "tireless": 0.2}
    assert judged(readings([tireless] * 100)).cause == "workers", "whose cores are busy, and no bus"
    loaded = {"copy": 1.0, "load": float(os.cpu_count() or 1)}  # from the beginning: the copy knows nothing else
    assert judged(readings([lane | loaded] * 100)).state == "saturated"


# ---------------------------------------------------------------------------------------------------- whose


def test_two_lanes_of_ours_that_share_the_bus_are_us() -> None:
    both = {"d2h": 1.0, "h2d": 1.0, "d2h.alone": 0.84, "h2d.alone": 0.8}
    assert judged(readings([both] * 20)).cause == "us"


def test_of_lanes_slower_than_sharing_explains_nobody_knows_whose_doing_it_is() -> None:
    both = {"d2h": 0.7, "h2d": 0.7, "d2h.alone": 0.6, "h2d.alone": 0.6}
    assert judged(readings([both] * 20)).cause == "unknown"
    assert judged(readings([both | {"ours": 80e9, "tree": 14.0, "others": 2.0}] * 20)).cause == "unknown"


def test_where_the_traffic_is_known_and_mostly_ours_it_is_us() -> None:
    slow = {"d2h": 0.7, "h2d": 0.7, "ours": 80e9}
    assert judged(readings([slow | {"traffic": 90e9}] * 20)).cause == "us"
    assert judged(readings([slow | {"traffic": 180e9}] * 20)).cause == "others"


# ---------------------------------------------------------------------------------------------- our workers


def crowd(spares: Iterable[float], **values: float) -> list[Reading]:
    """Our workers leave so much of the cores, while the lanes give all they have."""
    return readings({"d2h": 1.0, "h2d": 1.0, "spare": spare, **values} for spare in spares)


def test_workers_that_keep_the_cores_busy_are_made_room_for_whatever_the_lanes_give() -> None:
    """Fourteen processes that decode JPEGs on sixteen cores lost 5% to copies that were as fast as ever."""
    verdict = judged(crowd([0.1] * 10))
    assert (verdict.state, verdict.cause, verdict.left) == ("saturated", "workers", {"d2h": 1.0, "h2d": 1.0})
    assert shares(crowd([0.1] * 10))[-1] == FLOOR


def test_with_no_core_left_it_is_the_same() -> None:
    assert judged(crowd([0.0] * 10)).cause == "workers"


def test_workers_that_leave_cores_idle_are_no_reason() -> None:
    assert judged(crowd([0.4] * 50)).state == "free"


def test_workers_that_do_not_rest_are_made_room_for_also_where_they_leave_cores() -> None:
    """Nine processes that copied on sixteen cores lost a tenth to copies that were as fast as ever."""
    busy = {"d2h": 1.0, "h2d": 0.92, "spare": 0.5}
    assert judged(readings([busy | {"tireless": 0.56}] * 10)).cause == "workers"
    assert judged(readings([busy | {"tireless": 0.101}] * 10)).cause == "workers"
    assert judged(readings([busy | {"tireless": 0.099}] * 10)).state == "free"
    resting = [busy | {"tireless": part} for part in [0.56] * 10 + [0.07] * 50]
    assert judged(readings(resting)).cause == "workers"
    assert judged(readings([*resting, *[busy | {"tireless": 0.04}] * CALM])).state == "free"


def test_once_they_are_they_stay_it_until_many_cores_are_idle() -> None:
    assert judged(crowd([0.1] * 10 + [0.4] * 50)).cause == "workers"
    assert judged(crowd([0.1] * 10 + [0.6] * (CALM + 5))).state == "free"


def test_lanes_that_are_slow_beside_them_are_what_counts() -> None:
    assert judged(readings([{"d2h": 0.6, "h2d": 0.6, "spare": 0.1}] * 10)).cause == "unknown"


def test_a_program_of_which_nothing_moves_takes_nothing_from_its_workers() -> None:
    assert judged(readings([{"spare": 0.1}] * 50)).state == "free"


def test_while_nothing_moves_for_their_sake_they_stay_the_reason() -> None:
    assert judged(crowd([0.1] * 10) + readings([{"spare": 0.1}] * 2 * BLIND, start=200.0)).cause == "workers"


def test_workers_that_nobody_counts_any_more_are_none() -> None:
    without = readings([{"d2h": 1.0, "h2d": 1.0}] * CALM, start=200.0)
    assert judged(crowd([0.1] * 10) + without).state == "free"


@pytest.mark.parametrize("after", [{"d2h": 1.0, "h2d": 0.9, "spare": 0.9}, {"spare": 0.9}])
def test_after_workers_that_alone_were_the_reason_the_bus_is_free_as_it_was_before(after: dict[str, float]) -> None:
    """Whatever the lanes give, if it was no reason before; and also while nothing of ours moves."""
    lane = {"d2h": 1.0, "h2d": 0.9}
    given = [{**lane, "spare": 0.9}] * 10 + [{**lane, "spare": 0.1}] * 10 + [after] * CALM
    assert [verdict.state for verdict in verdicts(readings(given))][9::10] == ["free", "saturated", "free"]


def test_after_workers_beside_which_lanes_were_slow_it_is_the_lanes_that_tell() -> None:
    slow = {"d2h": 1.0, "h2d": 0.7}
    given = [{**slow, "spare": 0.1}] * 10 + [{"d2h": 1.0, "h2d": 0.9, "spare": 0.9}] * 30
    assert judged(readings(given)).state == "saturated"


# --------------------------------------------------------------------------------- what is missing or wrong


def test_a_missing_reading_changes_nothing() -> None:
    values = [{"d2h": 0.7, "h2d": 0.7}] * 10 + [NOTHING] * STALE
    assert judged(readings(values)).state == "saturated"


def test_a_lane_that_is_not_used_any_more_says_nothing_any_more() -> None:
    values = [{"d2h": 1.0, "h2d": 0.5}] * 10 + [{"d2h": 1.0}] * (STALE + CALM + 1)
    verdict = judged(readings(values))
    assert verdict.left == {"d2h": 1.0}
    assert verdict.state == "free"


def test_a_lane_that_is_used_again_is_judged_afresh() -> None:
    values = [{"d2h": 0.5, "h2d": 0.5}] * 10 + [{"d2h": 1.0}] * (STALE + CALM + 1) + [{"d2h": 1.0, "h2d": 1.0}]
    assert judged(readings(values)) == Verdict(
        "free", "nobody", {"d2h": pytest.approx(1.0), "h2d": 1.0}, pytest.approx(1.0)
    )


def test_without_copies_the_load_is_over_when_the_cores_are_idle() -> None:
    loaded = {"d2h": 0.6, "h2d": 0.6, "load": 9.0}
    blind = [{"load": 9.0}] * 30
    assert judged(readings([loaded] * 10 + blind)).state == "saturated"
    assert judged(readings([loaded] * 10 + blind + [{"load": 1.5}] * CALM)).state == "free"


@pytest.mark.parametrize("known", [{}, {"load": 0.3}])
def test_the_load_that_has_to_be_over_is_that_since_lanes_became_slow(known: dict[str, float]) -> None:
    """Cores are read once a second: what was known of them as lanes became slow was of before, or nothing."""
    slow, busy = {"d2h": 0.6, "h2d": 0.6}, {"load": 9.0}
    given = [slow | known] * 6 + [busy] * 20 + [{"load": 0.5}] * CALM
    states = [verdict.state for verdict in verdicts(readings(given))]
    assert set(states[3:26]) == {"saturated"}
    assert states[-1] == "free"


def test_a_load_that_becomes_a_little_less_is_not_over() -> None:
    """Nor is one after which what planned for it is gone, or workers have begun with their epoch."""
    slow, middling = {"d2h": 0.6, "h2d": 0.6}, {"d2h": 0.9, "h2d": 0.9}
    for before in ([9.0] * 20, [9.0] * 20 + [18.0] * 5):
        for after in ({}, middling):
            given = [slow | {"load": load} for load in before] + [after | {"load": 6.0}] * 3 * CALM
            assert judged(readings(given)).state == "saturated"


def test_the_load_before_is_nothing_to_the_next_one() -> None:
    slow = {"d2h": 0.6, "h2d": 0.6}
    given = [slow | {"load": 14.0}] * 40 + [{"d2h": 1.0, "h2d": 1.0, "load": 0.2}] * 2 * CALM
    given += [slow | {"load": 3.0}] * 10 + [{"load": 3.0}] * 3 * CALM
    assert judged(readings(given)).state == "saturated"


def test_between_the_thresholds_the_load_is_over_when_the_cores_are_idle() -> None:
    """Plans for a load have other copies, which gave 0.9 of what they should after it, too: it lasted 60 steps more."""
    loaded, middling = {"d2h": 0.7, "h2d": 0.7, "load": 14.0}, {"d2h": 0.9, "h2d": 0.9}
    beside = [loaded] * 10 + [middling | {"load": 13.0}] * 30
    after = [middling | {"load": 1.2}] * (CALM + 2)
    assert judged(readings(beside)).state == "saturated"
    assert judged(readings(beside + after)).state == "free"


def test_without_copies_the_load_is_over_when_the_timed_copy_is_fast() -> None:
    loaded = {"d2h": 0.6, "h2d": 0.6, "copy": 0.5}
    assert judged(readings([loaded] * 10 + [{"copy": 0.5}] * 30)).state == "saturated"
    assert judged(readings([loaded] * 10 + [{"copy": 1.0}] * (CALM + 5))).state == "free"


def test_without_copies_a_known_traffic_tells_what_the_lanes_would_give() -> None:
    curve = [(0.0, 1.0), (70e9, 0.97), (130e9, 0.7)]
    calibration = Calibration(curves={"d2h": curve, "h2d": curve})
    loaded = {"d2h": 0.6, "h2d": 0.6, "traffic": 150e9, "ours": 10e9}
    quiet = [{"traffic": 20e9, "ours": 0.0}] * CALM
    busy = [{"traffic": 100e9, "ours": 0.0}] * 30
    assert judged(readings([loaded] * 10 + busy), calibration).bus == pytest.approx(0.835)
    assert judged(readings([loaded] * 10 + busy), calibration).state == "saturated"
    assert judged(readings([loaded] * 10 + busy + quiet), calibration).state == "free"


def test_without_anything_that_tells_a_load_is_taken_to_end_in_time() -> None:
    values = [{"d2h": 0.6, "h2d": 0.6}] * 10 + [NOTHING] * (BLIND + CALM)
    found = [verdict.state for verdict in verdicts(readings(values))]
    assert found[10 + BLIND - 2] == "saturated"
    assert found[-1] == "free"


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -1.0])
def test_nonsense_counts_as_missing(nonsense: float) -> None:
    values = [{"d2h": 1.0, "h2d": 1.0}] * 5 + [{"d2h": nonsense, "h2d": 1.0}] * 10
    assert judged(readings(values)).left == {"d2h": 1.0, "h2d": 1.0}


def test_a_clock_that_goes_back_counts_for_nothing() -> None:
    judge = Judge()
    for reading in lanes([1.0] * 10):
        judge.judge(reading)
    for reading in lanes([0.1] * 10):  # the same times once more
        assert judge.judge(reading).state == "free"


def test_after_a_long_gap_the_lanes_are_judged_afresh() -> None:
    before, after = lanes([0.6] * 10), readings([{"d2h": 1.0, "h2d": 1.0}] * CALM, start=200 + GAP)
    assert judged(before + after).state == "free"
    assert judged(before + after[:1]).left == {"d2h": 1.0, "h2d": 1.0}


def every(seconds: float, values: Iterable[dict[str, float]], start: float = 100.0) -> list[Reading]:
    return [Reading(start + seconds * k, value) for k, value in enumerate(values)]


@pytest.mark.parametrize("seconds", [GAP / 2, 1.5 * GAP, 10 * GAP])
def test_a_load_is_seen_also_where_iterations_are_long(seconds: float) -> None:
    loaded = [{"d2h": 1.0, "h2d": 1.0}] * 10 + [{"d2h": 0.6, "h2d": 0.6}] * 10
    assert judged(every(seconds, loaded)).state == "saturated"


def test_after_a_gap_that_is_long_for_long_iterations_the_lanes_are_judged_afresh() -> None:
    before = every(2 * GAP, [{"d2h": 0.6, "h2d": 0.6}] * 10)
    quiet = [{"d2h": 1.0, "h2d": 1.0}]
    assert judged(before + every(1.0, quiet, before[-1].at + 5 * GAP)).left["h2d"] < 1
    assert judged(before + every(1.0, quiet, before[-1].at + 7 * GAP)).left == {"d2h": 1.0, "h2d": 1.0}


def test_one_gap_does_not_make_the_next_one_usual() -> None:
    before = lanes([1.0] * 10)
    again = every(1.0, [{"d2h": 0.6, "h2d": 0.6}] * 10, before[-1].at + 100 * GAP)
    afresh = every(1.0, [{"d2h": 1.0, "h2d": 1.0}], again[-1].at + 2 * GAP)
    assert judged(before + again + afresh).left == {"d2h": 1.0, "h2d": 1.0}


# -------------------------------------------------------------------------------------------------- recorded


def test_the_loads_of_a_recorded_run_are_found_and_their_ends() -> None:
    """Copies of a lane of the host beside processes that came and went; see the file."""
    recorded = json.loads(RECORDED.read_text())
    given = [Reading(at, values) for at, values in recorded["readings"]]
    found = [verdict.state for verdict in verdicts(given)]
    (first, over), (second, end) = recorded["loads"]
    assert set(found[:first]) == {"free"}
    for begin in (first, second):
        assert "saturated" in found[begin : begin + 5]
    assert set(found[first + 5 : over]) == set(found[second + 5 : end]) == {"saturated"}
    assert "free" in found[over:second]


# ----------------------------------------------------------------------------------------------- calibration

MiB = 1 << 20


def test_copies_of_a_kind_are_compared() -> None:
    calibration = Calibration()
    for _ in range(5):
        calibration.learn(kind_of("h2d", 64 * MiB, False), [50e9])
        calibration.learn(kind_of("h2d", 2 * MiB, False), [40e9])
    assert calibration.expected(kind_of("h2d", 20 * MiB, False)) == 50e9
    assert calibration.expected(kind_of("h2d", 3 * MiB, False)) == 40e9
    assert calibration.expected(kind_of("h2d", 5 * MiB, False)) is None
    assert calibration.expected(kind_of("d2h", 64 * MiB, False)) is None
    assert calibration.expected(kind_of("h2d", 64 * MiB, True)) is None


def test_what_a_lane_can_give_was_sustained() -> None:
    calibration = Calibration()
    for rate in (50, 50, 50, 50, 50, 90, 50, 50):
        calibration.learn(kind_of("h2d", 64 * MiB, False), [rate * 1e9])
    assert calibration.expected(kind_of("h2d", 64 * MiB, False)) == 50e9


def test_what_was_measured_before_counts_from_the_first_copy() -> None:
    """A program that starts beside a load must not take that for normal."""
    calibration = Calibration({"h2d": 55e9, "d2h": None})
    calibration.learn(kind_of("h2d", 64 * MiB, False), [39e9])
    assert calibration.expected(kind_of("h2d", 64 * MiB, False)) == 55e9
    for _ in range(5):
        calibration.learn(kind_of("h2d", 64 * MiB, False), [52e9])
    assert calibration.expected(kind_of("h2d", 64 * MiB, False)) == 52e9
    assert calibration.expected(kind_of("h2d", 2 * MiB, False)) is None
    assert calibration.expected(kind_of("d2h", 64 * MiB, False)) is None


def backed_off(rates: Iterable[float], calibration: Calibration | None = None) -> list[bool]:
    """Whether the back-off was at work after each copy, a copy a reading."""
    calibration, kind = calibration or Calibration(), kind_of("h2d", 64 * MiB, False)
    judge, backoff, found = Judge(calibration), Backoff(), []
    for at, rate in enumerate(rates):
        calibration.learn(kind, [rate * 1e9])
        expected = calibration.expected(kind)
        assert expected is not None
        backoff = backoff.step(judge.judge(Reading(100.0 + at, {"h2d": min(rate * 1e9 / expected, 1.0)})))
        found.append(backoff.share < 1)
    return found


@pytest.mark.parametrize("burst", [5, 10, 20])
@pytest.mark.parametrize("before", [0, 150, 1090])
def test_a_burst_of_fast_copies_does_not_hold_a_run_back_without_a_load(before: int, burst: int) -> None:
    """As at the boost clock of a GPU that was idle."""
    assert sum(backed_off([44.0] * before + [55.0] * burst + [44.0] * (10_000 - before - burst))) < 200


def test_what_a_lane_gave_for_long_and_gives_no_more_is_forgotten() -> None:
    found = backed_off([55.0] * 500 + [44.0] * 2000)
    assert all(found[510:1400])  # until then it may be a load
    assert not any(found[1700:])


def test_a_load_is_not_forgotten_where_there_are_quiet_times_between() -> None:
    found = backed_off(([55.0] * 300 + [38.0] * 700) * 5)
    assert all(all(found[k + 310 : k + 1000]) for k in range(0, 5000, 1000))


def test_what_was_measured_before_is_never_forgotten() -> None:
    assert all(backed_off([38.0] * 5000, Calibration({"h2d": 55e9}))[10:])


@pytest.mark.parametrize(("noise", "at_most"), [(0.02, 0.0), (0.08, 0.03)])
def test_noise_is_no_load(noise: float, at_most: float, seed: int) -> None:
    random = Random(seed)
    assert sum(backed_off(50.0 * (1 + random.gauss(0, noise)) for _ in range(10_000))) <= at_most * 10_000


def test_curves_come_from_the_probe() -> None:
    points = [{"host_traffic": t * 1e9, "bandwidth": b * 1e9, "workers": 1} for t, b in ((127, 39), (0, 55), (98, 45))]
    report = {"results": [{"path": {"lane": "h2d"}, "loaded": points}, {"path": {"lane": None}, "loaded": points}]}
    assert curves_of(report) == {"h2d": [(0.0, 1.0), (98e9, 45 / 55), (127e9, 39 / 55)]}
    calibration = Calibration(curves=curves_of(report))
    assert calibration.left_at("h2d", 49e9) == pytest.approx((1 + 45 / 55) / 2)
    assert calibration.left_at("h2d", 500e9) == pytest.approx(39 / 55)
    assert calibration.left_at("d2h", 49e9) is None
    with pytest.raises(ValueError, match="not a report"):
        curves_of({"paths": []})
    with pytest.raises(ValueError, match="no lane in it was measured under load"):
        curves_of({"results": [{"path": {"lane": "h2d"}, "loaded": []}]})
