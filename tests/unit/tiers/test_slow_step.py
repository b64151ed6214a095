"""Why was a step slow? What it waited for beyond the others, and what happened in it, from a run's timeline."""

from __future__ import annotations

import json
import re
from unittest import mock

import pytest

from torch_tiers.allocator.errors import TiersError
from torch_tiers.migrator.telemetry.timeline import LATE, SLOWEST, Timeline
from torch_tiers.planning.slow_step import look_at, recorded_from_json, render, to_json

STEPS = 20
SLOW = 12


class Program:
    """Steps of a second, by a timeline; `during` the slow one something may happen."""

    def __init__(self, slow: float = 1.0) -> None:
        self.timeline, self.slow = Timeline(), slow
        self.begin = 0.0

    def happened(self, what: str, at: float, **more: object) -> None:
        with mock.patch("time.perf_counter", return_value=at):
            self.timeline.happened(what, **more)

    def run(self, *, wait: float = 0.0, usual: float = 0.1, **during: dict[str, object]) -> str:
        self.happened("plan by auto", 0.5, plan="9 GiB move")
        now = 0.0
        for number in range(1, STEPS + 1):
            begin, now = now, now + 1.0 + (self.slow if number == SLOW else 0.0)
            waited = usual + (wait if number == SLOW else 0.0)
            if waited:
                self.timeline.waited("cpu", "h2d", begin + 0.1, begin + 0.1 + waited)
            for what, more in during.items() if number == SLOW else ():
                self.happened(what.replace("_", " "), begin + 0.2, **more)
            self.timeline.step(number, now)
        return self.told()

    def told(self, number: int = SLOW, recomputing: float = 0.0) -> str:
        return "\n".join(render(look_at(recorded_from_json(self.timeline.to_json()), number), recomputing))


def test_a_step_as_the_others_is_not_slow() -> None:
    assert (
        Program(slow=0.0).run()
        == "step 12 took 1000.0 ms, 1.00 times the median of 18 others (1000.0 ms)\nthat is not slow"
    )


def test_a_step_that_waited_longer_says_for_what() -> None:
    told = Program().run(wait=0.9)
    assert "step 12 took 2000.0 ms, 2.00 times the median" in told
    assert "- 1000.0 ms were spent waiting for copies back from host memory (h2d), 100.0 ms as a rule" in told
    assert "- the other 100.0 ms more come from nothing that tiers knows of" in told


def test_a_step_without_a_cause_is_nothing_that_tiers_knows_of() -> None:
    assert "- the 1000.0 ms more come from nothing that tiers knows of: the program itself" in Program().run()


def test_the_largest_cause_comes_first() -> None:
    mostly_waits = Program().run(wait=0.9, hbm_was_full={"bytes": 2048})
    assert mostly_waits.index("waiting for") < mostly_waits.index("hbm was full: 2.0 KiB lay in host memory")
    mostly_else = Program().run(wait=0.2, hbm_was_full={})
    assert mostly_else.index("hbm was full, and memory was unmapped") < mostly_else.index("waiting for")


@pytest.mark.parametrize(
    ("what", "more", "said"),
    [
        ("plan_by_auto", {"plan": "all moves"}, "a new plan was adopted: all moves"),
        ("learns_anew", {}, "from it on the program was recorded anew"),
        ("dram_was_short", {"others": "1 GiB by x"}, "host memory was short; others held: 1 GiB by x"),
        ("monitor", {"says": "bus saturated"}, "the monitor changed its mind: bus saturated"),
    ],
)
def test_what_happened_in_the_step_is_told(what: str, more: dict[str, object], said: str) -> None:
    told = Program().run(**{what: more})
    assert f"- {said}" in told and "what was not timed of these" in told


def test_a_step_before_there_was_a_plan_was_recorded() -> None:
    program = Program()
    for number in range(1, 4):
        program.timeline.step(number, float(number))
    program.happened("plan by auto", 2.5)
    assert "there was no plan yet" in program.told(2)
    assert "there was no plan yet" in program.told(3)


@pytest.mark.parametrize("end", ["learned", "plan by auto"])
def test_a_step_that_was_recorded_anew_is_told_until_that_is_over(end: str) -> None:
    program = Program()
    program.happened("plan by auto", 0.5)
    program.happened("learns anew", 3.5)
    program.happened(end, 5.5)
    for number in range(1, 9):
        program.timeline.step(number, float(number))
    anew = [number for number in range(2, 9) if "it was recorded anew" in program.told(number)]
    assert anew == [5, 6]


def test_a_back_off_that_began_earlier_is_told_until_it_is_over() -> None:
    program = Program()
    program.happened("monitor", 3.5, says="bus saturated: at most 16 groups come back ahead")
    assert "the monitor had backed off: bus saturated" in program.run()
    program = Program()
    program.happened("monitor", 3.5, says="bus saturated: at most 16 groups come back ahead")
    program.happened("monitor", 4.5, says="bus free: no longer backed off")
    assert "monitor" not in program.run()


def test_recomputing_is_told_as_what_every_step_has() -> None:
    program = Program()
    program.run()
    assert "recomputing is no cause: it takes 5.0 ms of every iteration" in program.told(recomputing=0.005)


def test_where_waits_are_a_sample_that_is_said() -> None:
    program = Program()
    program.timeline.waited("cuda:0", "h2d", 0.1, 0.2)
    assert program.run().endswith("waits of a GPU are a sample, so one may be missing here")


@pytest.mark.parametrize("number", [1, STEPS + 1, 0, -3])
def test_a_step_that_is_not_there_is_refused(number: int) -> None:
    program = Program()
    program.run()
    with pytest.raises(TiersError, match=f"does not hold step {number}: it has 19 of steps 2 to 20"):
        program.told(number)


def test_a_run_of_one_step_has_none() -> None:
    program = Program()
    program.timeline.step(1, 1.0)
    with pytest.raises(TiersError, match="holds no step"):
        program.told(1)


def test_the_json_has_the_causes() -> None:
    program = Program()
    program.run(wait=0.9)
    told = to_json(look_at(recorded_from_json(program.timeline.to_json()), SLOW))
    assert (told["step"], told["seconds"], told["median_s"]) == (SLOW, pytest.approx(2.0), pytest.approx(1.0))
    assert [cause["seconds"] for cause in told["causes"]] == [pytest.approx(0.9)]


def test_the_slowest_steps_are_kept_in_full_however_long_the_program_goes_on() -> None:
    timeline, now = Timeline(most=200), 0.0
    for number in range(1, 1001):
        begin, now = now, now + (3.0 if number in (40, 70) else 1.0)
        for copy in range(5):
            timeline.waited("cpu", "h2d", begin + copy / 10, begin + copy / 10 + (0.05 if number == 40 else 0.01))
        timeline.step(number, now)
    shown = timeline.to_json()
    told = " ".join(render(look_at(recorded_from_json(shown), 40), 0.0))
    assert "step 40 took 3000.0 ms" in told
    assert re.search(r"250\.0 ms were spent waiting for copies back", told)
    events = [event for event in json.loads(shown)["traceEvents"] if event["ph"] == "X"]
    assert len(events) <= 2 * 200 + 6 * SLOWEST
    assert len({json.dumps(event) for event in events}) == len(events)
    assert json.loads(shown)["otherData"]["dropped_events"] == 1000 * 5 + 999 - len(events)
    assert LATE < 200 / 5
