"""What a program needs, what it ran in, and how much slower that made it: the head of `tiers report`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.modelled import gpt
from tests.unit.tiers.test_cli import STATS
from torch_tiers.allocator.sizes import GiB
from torch_tiers.migrator.model.links import PCIE_GEN5
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.policies import POLICIES
from torch_tiers.migrator.simulator import simulate
from torch_tiers.planning.answer import Answer, answer, render
from torch_tiers.planning.suggest import needs
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
    return answer(trace, PCIE_GEN5, stats, why(trace, PLAN, PCIE_GEN5, stats))


def text(of: Answer) -> str:
    return " ".join(render(of))


def test_it_tells_what_the_program_needs_and_what_it_had() -> None:
    given = answered(None)
    assert (given.needs, given.ran_in, given.budget) == (needs(MODEL, PCIE_GEN5), 8 * GiB, 9 * GiB)
    assert "ran in 8.0 GiB" in text(given)


def test_before_anything_was_measured_the_prediction_counts() -> None:
    given = answered(None)
    assert given.slower == pytest.approx(RESULT.seconds / RESULT.ideal - 1)
    assert "as is predicted" in text(given)


@pytest.mark.parametrize("times", [1.0, 1.5, 4.0])
def test_an_iteration_that_takes_as_long_as_predicted_or_longer_counts_as_it_is(times: float) -> None:
    given = answered(times * RESULT.seconds)
    assert given.slower == pytest.approx(times * RESULT.seconds / RESULT.ideal - 1)
    assert f"off by {1 - 1 / times:.0%}" in text(given)


def test_where_too_much_was_predicted_the_ideal_is_too_much_as_well() -> None:
    given = answered(RESULT.seconds / 2)
    assert given.slower == pytest.approx(RESULT.seconds / RESULT.ideal - 1)
    assert "0.50 times what was predicted" in text(given)


def test_nothing_is_told_of_speed_where_sizes_change() -> None:
    given = answered(1.0, replace(MODEL, varies=True))
    assert given.slower is None
    assert "cannot be told" in text(given)


def test_a_program_that_lost_nothing_is_not_said_to_be_slower() -> None:
    assert "as fast as with all" in text(Answer(GiB, GiB, GiB, 0.0, 0.0))
