"""Why a step takes what it takes, as `tiers report` tells it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from tests.unit.modelled import gpt
from tests.unit.tiers.test_cli import STATS
from tests.unit.traces import chain
from torch_tiers.allocator.sizes import GiB, MiB
from torch_tiers.cli.main import main
from torch_tiers.migrator.model import trace_json
from torch_tiers.migrator.model.clocks import Clocks
from torch_tiers.migrator.model.links import PCIE_GEN5, links_from
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.policies import POLICIES
from torch_tiers.planning.why import Why, render, to_json, why

MODEL = gpt(blocks=6)


def planned(budget: int, policy: str = "auto") -> Plan:
    return POLICIES[policy](MODEL, budget, PCIE_GEN5)


def account(plan: Plan, *, seconds: float | None = None, budget: int = 12 * GiB, iterations: int = 10) -> Why:
    stats: dict[str, Any] = {
        "step_s": {"median": seconds},
        "steps": 10,
        "iterations": iterations,
        "budget": {"hbm": budget},
    }
    return why(MODEL, plan, links_from({}, disk=False), stats)


def test_what_was_saved_is_kept_moved_or_recomputed() -> None:
    plan = planned(11 * GiB)
    actions = account(plan).actions
    assert plan.recompute
    assert sum(action.nbytes for action in actions) == MODEL.saved_bytes
    assert sum(action.sites for action in actions) == len(MODEL.sites)


def test_what_is_recomputed_is_told_by_operation_the_most_bytes_first() -> None:
    recomputed = [a for a in account(planned(11 * GiB)).actions if a.what.startswith("recomputed by")]
    assert "recomputed by gelu" in [action.what for action in recomputed]
    assert [a.nbytes for a in recomputed] == sorted((a.nbytes for a in recomputed), reverse=True)


def test_the_parts_of_an_iteration_add_up_to_what_was_predicted() -> None:
    told = account(planned(8 * GiB), seconds=1.0)
    *_, table = (part for part in render(told) if isinstance(part, Table))
    parts = list(table.columns[0].cells)
    assert parts[0] == "everything kept (ideal)" and parts[-2:] == ["predicted", "measured (median)"]
    result = told.result
    assert result.seconds >= result.ideal + result.recomputing + sum(result.stalls.values()) - 1e-9


def test_a_step_of_several_iterations_is_measured_by_the_iteration() -> None:
    assert account(planned(12 * GiB), seconds=0.8, iterations=40).measured == pytest.approx(0.2)


def test_steps_in_which_the_program_was_learned_do_not_count() -> None:
    step = {"median": 1.0, "settled": {"median": 0.1, "steps": 5}}
    stats = {"step_s": step, "steps": 10, "iterations": 10, "budget": {"hbm": 12 * GiB}}
    assert why(MODEL, planned(12 * GiB), PCIE_GEN5, stats).measured == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("budget", "policy", "seconds", "hint"),
    [
        (6 * GiB, "move", None, "waiting for d2h"),
        (40 * GiB, "keep", 1.0, "times what was predicted"),
        (40 * GiB, "keep", 1e-3, "the host was slow while iterations were recorded"),
    ],
)
def test_it_says_what_would_help(budget: int, policy: str, seconds: float | None, hint: str) -> None:
    assert any(hint in text for text in account(planned(budget, policy), seconds=seconds).hints)


def test_it_says_where_the_budget_goes_that_no_activation_takes() -> None:
    assert "optimizer state" in account(planned(40 * GiB, "keep"), budget=max(MODEL.others)).hints[0]


@pytest.mark.parametrize(
    ("steps", "more", "said"), [(5, GiB, True), (5, 0, False), (5, 100 * MiB, False), (4, GiB, False)]
)
def test_it_says_what_moves_though_no_plan_foresees_it(steps: int, more: int, said: bool) -> None:
    """A mixture of experts moved 1.7 GiB a step, and its plan none: nothing in a report told so."""
    plan = planned(8 * GiB, "move")
    moved = {"d2h": steps * (plan.moved_bytes + more), "h2d": 0, "disk_write": 0, "disk_read": 0}
    stats = {
        "step_s": {"median": 1.0, "settled": {"median": 1.0, "steps": steps}},
        "settled": {"iterations": steps, "moved": moved, "stalled_s": {}},
        "steps": 10,
        "iterations": 10,
        "stalls": {},
        "budget": {"hbm": 8 * GiB},
    }
    hints = why(MODEL, plan, PCIE_GEN5, stats).hints
    assert any(hint.startswith("1.0 GiB an iteration are moved besides") for hint in hints) == said


def test_where_nothing_is_lost_nothing_is_advised() -> None:
    assert account(planned(40 * GiB), budget=40 * GiB).hints == ()


def test_a_step_that_is_predicted_to_take_no_time_is_not_divided_by() -> None:
    """As of a trace that somebody has written: its clocks tell of no time, and its ideal of some."""
    trace = chain([MiB] * 8)
    clocks = Clocks((0.0,) * (trace.positions + 1), (0.0,) * (trace.positions + 1))
    trace = replace(trace, clocks=clocks, times=(0.0,) * trace.positions, seconds=1.0)
    stats = {**STATS, "budget": {**STATS["budget"], "hbm": 0}}
    assert why(trace, POLICIES["keep"](trace, GiB, PCIE_GEN5), PCIE_GEN5, stats).hints == ()


def test_a_trace_without_times_is_told_by_bytes_alone() -> None:
    trace = chain([MiB] * 8)
    plan = POLICIES["flashneuron"](trace, 4 * MiB, PCIE_GEN5)
    told = why(trace, plan, PCIE_GEN5, STATS)
    assert told.hints == () and len([*render(told)]) == 2


def test_the_report_accounts_for_the_plan_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "stats.json").write_text(json.dumps(STATS))
    (tmp_path / "trace.json").write_text(trace_json.write(MODEL))
    (tmp_path / "plan.json").write_text(planned(11 * GiB).to_json())
    assert main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "recomputed by gelu" in printed and "hbm at its fullest" in printed
    assert main(["report", "--json", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["why"]["predicted_s"] == pytest.approx(account(planned(11 * GiB)).result.seconds)
    assert {key: told[key] for key in STATS} == STATS


def test_a_plan_without_its_trace_costs_the_account_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")  # paths may be long, and are cut where the terminal ends
    (tmp_path / "stats.json").write_text(json.dumps(STATS))
    (tmp_path / "plan.json").write_text(replace(planned(11 * GiB)).to_json())
    assert main(["report", str(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "no account of the plan: " in text and "trace.json does not exist" in text


def test_where_sizes_change_from_step_to_step_nothing_is_predicted_in_numbers() -> None:
    """A mixture of experts was told 0.99 of an ideal step, which four of its own fitted into."""
    stats: dict[str, Any] = {"step_s": {"median": 1.0}, "steps": 10, "iterations": 10, "budget": {"hbm": 12 * GiB}}
    told = why(replace(MODEL, varies=True), planned(8 * GiB), PCIE_GEN5, stats)
    lines = [part for part in render(told) if isinstance(part, str)]
    assert any("change from step to step" in line for line in lines)
    assert not any("predicted" in str(table.title) for table in render(told) if isinstance(table, Table))
    seconds = [value for key, value in to_json(told).items() if key.endswith("_s") and key != "measured_s"]
    assert set(seconds) == {None} and told.hints == ()


def test_what_was_waited_for_optimizer_state_is_part_of_what_is_predicted_and_most_of_the_difference() -> None:
    stats: dict[str, Any] = {
        "step_s": {"median": 0.5, "settled": {"median": 0.5, "steps": 20}},
        "steps": 22,
        "iterations": 22,
        "budget": {"hbm": 12 * GiB},
        "moved": {"state_read": 1},
        "stalls": {"state": {"count": 20, "seconds": 30.0}},
        "settled": {"iterations": 20, "moved": {}, "stalled_s": {"state": 20.0}, "flushes": 0},
    }
    told = why(MODEL, planned(12 * GiB), PCIE_GEN5, stats)
    assert told.streaming_state == pytest.approx(1.0)
    assert told.predicted == pytest.approx(told.result.seconds + 1.0)
    assert [hint for hint in told.hints if "most of the difference" in hint] == [
        "most of the difference is waiting for optimizer state below hbm: more hbm helps, or a larger batch"
    ]


@pytest.mark.parametrize(("in_place", "known"), [(0, True), (4 * GiB, False)])
def test_with_state_that_is_streamed_the_ideal_is_known(in_place: int, known: bool) -> None:
    """Where optimizers read it in host memory, all times that were recorded have that in them."""
    stats: dict[str, Any] = {
        **{"step_s": {"median": None}, "steps": 10, "iterations": 10, "budget": {"hbm": 12 * GiB}},
        **{"state_in_dram": 4 * GiB, "state_in_place": in_place},
    }
    assert (why(MODEL, planned(12 * GiB), PCIE_GEN5, stats).in_dram == "") == known
