"""What the figures of `tiers report -o` are drawn from: each number of theirs is one of the plan's, or of the run's."""

from __future__ import annotations

import gzip
import itertools
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.numbers_of_a_run import STATS
from torch_tiers.allocator.sizes import GiB
from torch_tiers.migrator.controller.planned import needs
from torch_tiers.migrator.model import trace_json
from torch_tiers.migrator.model.fields import BadField
from torch_tiers.migrator.model.links import Links, links_from
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.policies import POLICIES
from torch_tiers.migrator.simulator import simulate
from torch_tiers.planning.answer import answer_of
from torch_tiers.planning.html import memory, prediction
from torch_tiers.planning.html.groups import bars_of
from torch_tiers.planning.html.history import history_from_json
from torch_tiers.planning.html.planned import Planned, planned
from torch_tiers.planning.html.thin import every, extremes, merged, shares
from torch_tiers.planning.why import why

DATA = Path(__file__).parents[2] / "data"
RAM = links_from({}, disk=False)
DRIVE = links_from({}, disk=True, below=400 * GiB, dram=2 * GiB)
PAST_DRAM = links_from({}, disk=True, direct=True, below=400 * GiB, dram=2 * GiB)
RECORDED = [
    ("llama", 0.6, "auto", RAM),
    ("llama", 0.6, "move", DRIVE),
    ("t5", 0.35, "auto", RAM),
    ("t5", 0.5, "move", PAST_DRAM),
    ("swin", 0.7, "capuchin", RAM),
    ("swin", 1.0, "keep", RAM),
]


@cache
def recorded(name: str) -> Trace:
    return trace_json.read(gzip.decompress((DATA / f"traces/{name}.json.gz").read_bytes()).decode())


def account(trace: Trace, plan: Plan, links: Links) -> Planned:
    because = why(trace, plan, links, STATS)
    return planned(trace, plan, links, because, answer_of(trace, links, STATS, because))


@pytest.fixture(params=RECORDED, ids=lambda param: f"{param[0]} {param[2]}")
def case(request: pytest.FixtureRequest) -> Planned:
    name, share, policy, links = request.param
    trace = recorded(name)
    return account(trace, POLICIES[policy](trace, int(share * needs(trace, links)), links), links)


@pytest.fixture
def on_cpu() -> Planned:
    directory = DATA / "runs/mlp"
    trace = trace_json.read((directory / "trace.json").read_text())
    return account(trace, Plan.from_json((directory / "plan.json").read_text()), RAM)


# ------------------------------------------------------------------------------------------------ the plan


def test_the_classes_of_memory_come_to_what_the_simulator_tells(case: Planned) -> None:
    parts = memory.classes(case)
    assert np.array_equal(sum(parts.values()), case.result.hbm)
    assert all(nbytes.min() >= 0 for nbytes in parts.values())
    assert bool(parts[memory.MOVE].any()) == bool(case.plan.groups)
    assert parts[memory.STAY].max() <= case.plan.kept_bytes


def test_a_machine_that_is_watched_does_what_it_does_otherwise(case: Planned) -> None:
    result = simulate(case.trace, case.links, case.plan)
    machine = case.machine
    assert (machine.stalls, machine.busy, machine.slowed) == (result.stalls, result.busy, result.slowed)
    assert machine.now == pytest.approx(result.clock[-1], abs=result.seconds)


def test_at_every_moment_the_device_does_one_thing(case: Planned) -> None:
    machine = case.machine
    spans = sorted([*machine.computing, *machine.for_host, *(s for each in machine.for_lane.values() for s in each)])
    assert all(one.end <= other.begin + 1e-6 for one, other in itertools.pairwise(spans))
    assert sum(span.end - span.begin for span in spans) == pytest.approx(machine.now, rel=1e-4)


def test_so_it_does_where_it_is_the_host_as_well(on_cpu: Planned) -> None:
    machine = on_cpu.machine
    assert len(machine.calling) == len(on_cpu.plan.groups)
    spans = sorted([*machine.computing, *machine.calling, *(s for each in machine.for_lane.values() for s in each)])
    assert sum(span.end - span.begin for span in spans) == pytest.approx(machine.now, rel=1e-4)


def test_the_waits_that_are_drawn_are_those_that_are_told(case: Planned) -> None:
    for lane, spans in case.machine.for_lane.items():
        assert sum(span.end - span.begin for span in spans) == pytest.approx(case.result.stalls[lane], abs=1e-6)


def test_all_that_moves_is_carried_once_each_way(case: Planned) -> None:
    carried = case.machine.carried
    assert carried["d2h"] + carried["gds_write"] == case.plan.moved_bytes
    assert carried["h2d"] + carried["gds_read"] <= case.plan.moved_bytes


def test_a_group_is_in_one_place_at_a_time_and_in_hbm_at_its_last_use(case: Planned) -> None:
    made = bars_of(case)
    assert len(made) == len(case.plan.groups)
    for bars in made:
        assert all(one.end == pytest.approx(other.begin) for one, other in itertools.pairwise(bars))
        assert bars[-1].place == "hbm"
    begins = [bars[0].begin for bars in made]
    assert begins == sorted(begins)


def test_a_group_is_drawn_on_the_tier_that_it_goes_to() -> None:
    trace = recorded("llama")
    plan = POLICIES["move"](trace, int(0.6 * needs(trace, DRIVE)), DRIVE)
    of = account(trace, plan, DRIVE)
    on = {tier: sum(any(bar.place == tier for bar in bars) for bars in bars_of(of)) for tier in ("dram", "nvme")}
    assert bool(on["nvme"]) == bool(of.result.peak["nvme"])
    assert bool(on["dram"]) == bool(of.result.peak["dram"])
    assert sum(on.values()) > 0


def test_the_parts_of_the_prediction_come_to_all_of_it(case: Planned) -> None:
    assert sum(prediction.parts(case.why).values()) == pytest.approx(case.why.predicted, rel=1e-3)
    streamed = replace(case.why, streaming=0.25, streaming_state=0.5)
    assert sum(prediction.parts(streamed).values()) == pytest.approx(case.result.seconds + 0.75, rel=1e-3)


# ---------------------------------------------------------------------------------------------- the steps


def step(name: str, at: float, took: float) -> dict[str, Any]:
    return {"name": name, "cat": "steps", "ts": at, "dur": took, "ph": "X", "args": {}}


def event(name: str, at: float, **args: str) -> dict[str, Any]:
    return {"name": name, "cat": "events", "ts": at, "ph": "i", "args": args}


def timeline(*events: object, **other: object) -> str:
    return json.dumps({"traceEvents": events, "otherData": other})


def test_steps_that_are_told_as_one_took_the_same_each() -> None:
    of = history_from_json(timeline(step("steps 3 to 6", 2e6, 4e6), step("step 2", 1e6, 1e6), dropped_events=7))
    assert of.numbers.tolist() == [2, 6]
    assert of.seconds.tolist() == [1.0, 1.0]
    assert of.dropped == 7


def test_a_plan_and_a_verdict_belong_to_the_step_in_which_they_came() -> None:
    said = timeline(
        step("step 2", 0, 1e6),
        step("step 3", 1e6, 1e6),
        event("plan by auto", 1.5e6, plan="1 GiB moves"),
        event("learns anew", 9e6),
        event("monitor", 9e6, says="memory bus saturated by others"),
        event("hooks rest", 9e6),
    )
    marks = history_from_json(said).marks
    assert [(mark.step, mark.name, mark.more) for mark in marks] == [
        (3, "plan by auto", "1 GiB moves"),
        (3, "learns anew", ""),
        (3, "monitor", "memory bus saturated by others"),
    ]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("[]", "timeline is a list and not an object"),
        (json.dumps({"traceEvents": 1}), "traceEvents is not a list"),
        (timeline({"cat": "steps", "name": "step 1", "ts": 1}), "step.dur is missing"),
        (timeline(step("step one", 0, 1)), "step.name is no name of a step"),
        (timeline(step("step 1", 0, 1e300)), "step.dur is 1e[+]300 and not a number"),
        (timeline({"cat": "events", "ts": 1}), "event.name is missing"),
        (timeline(event("plan by auto", "now")), "event.ts is 'now' and not a number"),  # type: ignore[arg-type]
        (timeline(dropped_events=-1), "otherData.dropped_events is -1 and not"),
    ],
)
def test_a_timeline_that_no_run_writes_is_refused_by_its_field(said: str, message: str) -> None:
    with pytest.raises(BadField, match=message):
        history_from_json(said)


def test_a_timeline_without_steps_is_one() -> None:
    assert len(history_from_json(timeline({"ph": "M", "name": "process_name"}, 3)).numbers) == 0


# -------------------------------------------------------------------------------------------- thinning


def test_what_is_thinned_keeps_its_highest_and_lowest() -> None:
    values = np.random.default_rng(1).normal(size=100_000)
    picked = extremes(values, 50)
    assert len(picked) <= 102
    assert picked.tolist() == sorted(set(picked.tolist()))
    assert (values[picked].max(), values[picked].min()) == (values.max(), values.min())
    assert (picked[0], picked[-1]) == (0, len(values) - 1)


@pytest.mark.parametrize("count", [0, 1, 99, 100])
def test_what_is_little_is_not_thinned(count: int) -> None:
    assert extremes(np.zeros(count), 50).tolist() == list(range(count))


def test_spans_that_nearly_touch_are_one_and_none_is_too_short_to_be_seen() -> None:
    assert merged([(5, 5.1), (0, 2), (2.5, 4)], 1) == [(0, 4), (5, 6)]
    assert len(merged([(at, at + 0.1) for at in range(10_000)], 10)) == 1
    assert merged([], 1) == []


def test_the_columns_of_a_row_are_as_full_as_the_time_was() -> None:
    assert shares([(0, 5), (7, 8)], 10, 5).tolist() == [1, 1, 0.5, 0.5, 0]
    assert shares([], 10, 3).tolist() == [0, 0, 0]
    spans = [(at, at + 0.3) for at in range(1000)]
    assert shares(spans, 1000, 7).mean() == pytest.approx(0.3, abs=1e-3)


@pytest.mark.parametrize("count", [0, 1, 150, 151, 10_000])
def test_no_more_rows_are_picked_than_there_is_room_for(count: int) -> None:
    assert len(every(range(count), 150)) <= 150
    assert len(every(range(count), 150)) >= min(count, 75)
