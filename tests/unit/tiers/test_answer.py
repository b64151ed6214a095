"""What a program needs, what it ran in, and how much longer that took: the head of `tiers report`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.modelled import gpt
from tests.unit.tiers.test_cli import STATS
from torch_tiers.allocator.sizes import GiB, format_at_least
from torch_tiers.migrator.controller.planned import needs
from torch_tiers.migrator.model.links import PCIE_GEN5
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.policies import POLICIES
from torch_tiers.migrator.simulator import simulate
from torch_tiers.planning.answer import Answer, answer_of, render
from torch_tiers.planning.why import why

MODEL = gpt(blocks=6)
PLAN = POLICIES["auto"](MODEL, 8 * GiB, PCIE_GEN5)
RESULT = simulate(MODEL, PCIE_GEN5, PLAN)


def answered(seconds: float | None, trace: Trace = MODEL) -> Answer:
    stats: dict[str, Any] = {
        **STATS,
        "step_s": {"median": seconds},
        "peak": {"hbm": 8 * GiB},
        "budget": {"hbm": 9 * GiB},
    }
    return answer_of(trace, PCIE_GEN5, stats, why(trace, PLAN, PCIE_GEN5, stats))


def text(of: Answer) -> str:
    return " ".join(render(of))


def test_it_tells_what_the_program_needs_and_what_it_had() -> None:
    given = answered(None)
    assert (given.needs, given.ran_in, given.budget) == (needs(MODEL, PCIE_GEN5), 8 * GiB, 9 * GiB)
    assert f"to need {format_at_least(needs(MODEL, PCIE_GEN5))}" in text(given)
    assert "the peak of the whole run 8.0 GiB" in text(given)


def test_before_anything_was_measured_the_prediction_counts() -> None:
    given = answered(None)
    assert given.times_as_long == pytest.approx(RESULT.seconds / RESULT.ideal)
    assert "is predicted to take" in text(given)


@pytest.mark.parametrize("times", [1.0, 1.05, 1.5, 4.0])
def test_an_iteration_that_takes_as_long_as_predicted_or_longer_counts_as_it_is(times: float) -> None:
    assert answered(times * RESULT.seconds).times_as_long == pytest.approx(times * RESULT.seconds / RESULT.ideal)


def test_what_the_plan_does_not_explain_is_not_said_to_be_the_budget_s_doing() -> None:
    assert f"the plan explains {RESULT.seconds / RESULT.ideal:.2f} times" in text(answered(2 * RESULT.seconds))


def test_of_a_budget_that_is_a_share_it_tells_from_when_on_it_held() -> None:
    told = text(replace(answered(None), share="60%"))
    assert "the budget was 9.0 GiB from the first plan on (60% of what was needed)" in told
    assert "the peak of the whole run, with the steps before, 8.0 GiB" in told


def test_where_too_much_was_predicted_the_ideal_is_too_much_as_well() -> None:
    given = answered(RESULT.seconds / 2)
    assert given.times_as_long == pytest.approx(RESULT.seconds / RESULT.ideal)
    assert "iterations took 0.50 times what was predicted" in text(given)


def test_nothing_is_told_of_time_where_iterations_differ() -> None:
    given = answered(1.0, replace(MODEL, varies=True))
    assert given.times_as_long is None
    assert "iterations differ from step to step" in text(given)


def test_a_trace_that_does_not_tell_what_else_lies_in_hbm_tells_no_need() -> None:
    given = answered(1.0, replace(MODEL, others=()))
    assert given.needs is None
    assert "is predicted to need" not in text(given)


def test_nothing_is_said_to_be_faster_than_with_all_memory() -> None:
    assert Answer(GiB, GiB, GiB, 1.0, 1.0, 0.98, False).times_as_long == 1.0
