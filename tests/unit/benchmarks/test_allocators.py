"""The benchmark of allocators, on the CPU: processes that take turns, and a table."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from io import StringIO

import pytest
import torch
from torch._dynamo.utils import counters

from benchmarks.allocators import Row, by_start, compare, reserved_to_live, table
from benchmarks.alternate import Ratio
from benchmarks.turns import WARMUP, environment, moves, work
from tests.unit import warm


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Of two processes that took turns: to start them takes seconds."""
    with warm.interpreter():
        return compare("reference_gpt", ["plain", "expandable"], 3, device="cpu", tiny=True)


def test_two_processes_take_turns_and_are_compared(rows: list[Row]) -> None:
    assert [row.variant for row in rows] == ["plain", "expandable"]
    assert rows[0].ratio.median == 1
    assert all(row.startup > max(row.steps) > 0 for row in rows)
    assert [len(row.before) for row in rows] == [WARMUP] * 2
    assert table(rows).count("\n") == 3


def test_ratios_are_told_start_by_start(rows: list[Row]) -> None:
    starts = [[replace(row, start=k, ratio=Ratio(1 + k / 8, 1.0, 2.0)) for row in rows] for k in range(2)]
    heading, _, line = by_start([row for start in starts for row in start]).splitlines()
    assert "start by start" in heading
    assert line.startswith("| expandable | 1.0000, 1.1250 | 1.0625 (1.0000 to 1.1250) |")


def test_ratios_of_the_fastest_steps_are_told_beside_those_of_all(rows: list[Row]) -> None:
    times = {"plain": [1.0] * 10 + [3.0] * 10, "expandable": [1.1] * 10 + [2.0] * 10}
    rows = [replace(row, steps=times[row.variant]) for row in rows]
    assert by_start(rows).endswith("| 1.1000 (1.1000 to 1.1000) |")


def test_variants_can_run_one_after_the_other() -> None:
    with warm.interpreter():
        rows = compare("changing_gpt", ["plain", "expandable"], 2, device="cpu", tiny=True, apart=True, turn=3)
    assert [row.variant for row in rows] == ["plain", "expandable"]
    assert all((len(row.before), len(row.steps)) == (WARMUP, 2) for row in rows), "a round is a turn's median"
    assert all(len(row.shares) == 1 + WARMUP + 2 * 3 - 2 for row in rows)


@pytest.mark.filterwarnings("default")  # PyTorch's own, while it compiles
def test_blocks_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    # All but the code that Inductor makes, which takes half a minute: tests.scenarios.compiled has some.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    counters.clear()
    answers = StringIO()
    work("reference_gpt", "cpu", tiny=True, commands=StringIO("step\nstep\n"), answers=answers, share=0.4)
    first, second = map(json.loads, answers.getvalue().splitlines())
    assert counters["stats"]["unique_graphs"] > 0
    assert first["step"] > second["step"]


def test_what_is_reserved_is_held_against_the_most_that_was_alive_so_far() -> None:
    steps = [(10.0, 20.0), (10.0, 20.0), (20.0, 21.0), (5.0, 21.0), (30.0, 33.0)]
    shares = reserved_to_live([{"allocated": live, "reserved": reserved} for live, reserved in steps])
    assert shares == pytest.approx([1.05, 1.05, 1.1])


def test_where_tensors_move_it_is_held_against_what_was_alive_in_the_step() -> None:
    steps = [{"allocated": live, "reserved": reserved} for live, reserved in [(40.0, 40.0), (30.0, 33.0), (20.0, 30.0)]]
    assert reserved_to_live(steps, each=True) == pytest.approx([1.1, 1.5])


def test_a_variant_may_have_a_policy_and_that_a_budget() -> None:
    assert environment("pages", "24GiB") == {"TIERS_ALLOCATOR": "pages", "TIERS_POLICY": "keep"}
    assert environment("pages:auto", "24GiB") == {
        "TIERS_ALLOCATOR": "pages",
        "TIERS_POLICY": "auto",
        "TIERS_HBM": "24GiB",
    }


def test_a_variant_may_run_beside_itself() -> None:
    assert environment("expandable#2", None) == environment("expandable", None)
    assert environment("pages:auto#2", "24GiB") == environment("pages:auto", "24GiB")
    assert moves("pages:auto#2")
    assert not moves("pages#2:auto")
