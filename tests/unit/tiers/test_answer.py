"""What a program needs, what it ran in, and how much longer that took: the head of `tiers report`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.modelled import gpt
from tests.unit.tiers.test_cli import STATS
from torch_tiers.allocator.sizes import GiB, MiB, format_at_least
from torch_tiers.migrator.controller.planned import needs
from torch_tiers.migrator.model.clocks import Clocks
from torch_tiers.migrator.model.links import PCIE_GEN5
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.policies import POLICIES
from torch_tiers.migrator.simulator import simulate
from torch_tiers.planning.answer import WITHOUT_GPU, Answer, answer_of, in_short, render
from torch_tiers.planning.why import to_json, why

ROOT = Path(__file__).parents[3]
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


def test_where_optimizer_state_lay_in_dram_no_step_tells_what_that_costs() -> None:
    """A GPT with 7 GiB of it there took 1.9 times plain's step, and was said to take 1.00 times as long."""
    stats: dict[str, Any] = {
        **STATS,
        "step_s": {"median": RESULT.seconds},
        "peak": {"hbm": 8 * GiB},
        "budget": {"hbm": 8 * GiB},
        "demoted": 7 * GiB,
        "state_in_dram": 7 * GiB,
    }
    account = why(MODEL, PLAN, PCIE_GEN5, stats)
    given = answer_of(MODEL, PCIE_GEN5, stats, account)
    assert given.needs == needs(MODEL, PCIE_GEN5) + 7 * GiB
    assert given.times_as_long is None
    assert "cannot be told, as 7.0 GiB of optimizer state lay in dram" in text(given)
    assert "ms as measured" in text(given)
    assert "cannot be told: 7.0 GiB of optimizer state lay in dram" in in_short(given)
    assert to_json(account)["ideal_s"] is None
    assert any("read and write 7.0 GiB of optimizer state over the link" in hint for hint in account.hints)


def test_optimizer_state_on_nvme_is_part_of_what_a_program_needs() -> None:
    stats: dict[str, Any] = {**STATS, "state_on_nvme": 7 * GiB}
    given = answer_of(MODEL, PCIE_GEN5, stats, why(MODEL, PLAN, PCIE_GEN5, stats))
    assert given.needs == needs(MODEL, PCIE_GEN5) + 7 * GiB
    assert "7.0 GiB of that, of optimizer state, lay on nvme at the end" in text(given)


def test_where_hbm_had_no_room_for_the_work_of_a_layer_no_step_tells_what_that_costs() -> None:
    """A graph attention took 2.9 times plain's step, as it was recorded with 2.4 GiB of one operator's in DRAM."""
    stats: dict[str, Any] = {**STATS, "step_s": {"median": RESULT.seconds}, "budget": {"hbm": 8 * GiB}}
    for overflow, known in ((2 * GiB, False), (8 * MiB, True)):
        account = why(MODEL, PLAN, PCIE_GEN5, stats | {"overflow": overflow})
        given = answer_of(MODEL, PCIE_GEN5, stats | {"overflow": overflow}, account)
        assert (given.times_as_long is not None) is known
        assert ("cannot be told, as 2.0 GiB that hbm had no room for lay in dram" in text(given)) is not known
        assert (to_json(account)["ideal_s"] is not None) is known


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
    assert "is predicted to take" in text(given)


def test_where_the_host_holds_the_program_up_it_tells_between_what_and_what_the_cost_lies() -> None:
    """A T5 took 1.39 times plain's step; recorded, its host took a third longer than plain does altogether."""
    stretches = len(MODEL.times) + 1
    trace = MODEL.on(Clocks(device=(0.3 / stretches,) * stretches, host=(0.4 / stretches,) * stretches))
    given = answered(0.45, trace)
    assert given.times_as_long is not None and given.at_most is not None
    assert given.times_as_long < given.at_most == pytest.approx(0.45 / 0.3)
    between = f"{given.times_as_long:.2f} to 1.50 times as long"
    assert between in text(given) and between in in_short(given)
    assert "the GPU waits for the CPU" in text(given)
    busy = MODEL.on(Clocks(device=(0.4 / stretches,) * stretches, host=(0.3 / stretches,) * stretches))
    assert answered(0.45, busy).at_most is None


def under_plan(low: float, high: float) -> Answer:
    """Nine of ten iterations take so many times what is predicted, the median one as long."""
    seconds = RESULT.seconds
    return replace(answered(seconds), most_took=(low * seconds, high * seconds))


def test_it_tells_within_what_bound_of_the_prediction_iterations_were() -> None:
    assert under_plan(0.97, 1.051).error == pytest.approx(0.051)
    for of in (text(under_plan(0.97, 1.051)), in_short(under_plan(0.97, 1.051))):
        assert "nine of ten iterations were within 6% of what was predicted" in of
    assert "within 1% of" in text(under_plan(1.0, 1.0)), "nothing is exact"


def test_an_error_that_is_no_bound_is_told_with_its_direction() -> None:
    for of in (text(under_plan(0.5, 0.9)), in_short(under_plan(0.5, 0.9))):
        assert "nine of ten iterations took 0.50 to 0.90 times what was predicted" in of


def test_what_was_measured_is_said_to_be_and_of_too_few_steps_no_bound_is_told() -> None:
    given = answered(RESULT.seconds)
    assert f"{RESULT.seconds * 1e3:.1f} ms as measured" in text(given) and given.error is None
    assert "too few" in text(given) and "nine of ten" not in in_short(given)
    assert "no iteration was measured" in text(answered(None))


def test_the_bound_is_of_an_iteration_where_a_step_has_several() -> None:
    settled = {"median": 4 * RESULT.seconds, "low": 3.6 * RESULT.seconds, "high": 4 * RESULT.seconds, "steps": 10}
    stats: dict[str, Any] = {**STATS, "iterations": 40, "step_s": {**STATS["step_s"], "settled": settled}}
    given = answer_of(MODEL, PCIE_GEN5, stats, why(MODEL, PLAN, PCIE_GEN5, stats))
    assert given.of_predicted == (pytest.approx(0.9), pytest.approx(1.0))
    few = {**stats, "step_s": {**STATS["step_s"], "settled": {**settled, "steps": 4}}}
    assert answer_of(MODEL, PCIE_GEN5, few, why(MODEL, PLAN, PCIE_GEN5, few)).of_predicted is None


def test_without_a_gpu_it_says_that_the_plain_program_is_faster() -> None:
    assert f"takes {WITHOUT_GPU} as long" in text(replace(answered(1.0), without_gpu=True))
    assert WITHOUT_GPU not in text(answered(1.0))
    assert f"Steps take {WITHOUT_GPU} as long" in (ROOT / "docs/limits.md").read_text()


def test_the_answer_has_few_lines() -> None:
    given = replace(under_plan(0.5, 3.0), without_gpu=True, demoted=GiB, share="60%")
    assert len([*render(given)]) <= 5


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
