"""The speed of a program over its budget, and the budget that is suggested."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.modelled import gpt
from tests.unit.tiers.test_cli import STATS
from torch_tiers.allocator.sizes import GiB
from torch_tiers.cli.main import main
from torch_tiers.migrator.controller.planned import needs
from torch_tiers.migrator.model import trace_json
from torch_tiers.migrator.model.clocks import Clocks
from torch_tiers.migrator.model.links import PCIE_GEN5
from torch_tiers.migrator.model.plan import LAYOUTS
from torch_tiers.planning.compare import Candidate
from torch_tiers.planning.suggest import FAST, Offer, best, offers, render

MODEL = gpt(blocks=6)


@pytest.fixture(scope="module")
def made() -> list[Offer]:
    return offers(MODEL, needs(MODEL, PCIE_GEN5), PCIE_GEN5, "auto", free=LAYOUTS)


def test_with_all_that_it_needs_a_program_is_at_full_speed(made: list[Offer]) -> None:
    assert made[0].share == 1
    assert made[0].speed == pytest.approx(1, abs=0.01)


def test_less_memory_never_makes_it_faster(made: list[Offer]) -> None:
    speeds = [offer.speed for offer in made]
    assert speeds == sorted(speeds, reverse=True)


def test_a_run_of_that_budget_has_as_much_for_its_plans(made: list[Offer]) -> None:
    for offer in made:
        assert offer.budget * (1 - LAYOUTS) >= offer.planned
        if isinstance(offer.outcome, Candidate) and offer.speed:
            assert offer.outcome.result.peak["hbm"] <= offer.planned


def test_the_smallest_budget_is_suggested_that_costs_little(made: list[Offer]) -> None:
    suggested = best(made)
    assert suggested is not None
    assert suggested.speed >= FAST * made[0].speed
    assert all(offer.speed < FAST * made[0].speed for offer in made if offer.budget < suggested.budget)


def test_of_a_program_that_is_slow_at_any_budget_some_is_suggested_all_the_same(made: list[Offer]) -> None:
    slow = [offer for offer in made if offer.speed < FAST]
    assert slow and best(slow) is not None


@pytest.mark.parametrize("host, said", [(0.2, False), (0.4, True)])
def test_where_the_host_holds_the_program_up_speeds_are_said_to_be_uncertain(host: float, said: bool) -> None:
    """With what recordings overstate as the ideal, recomputing seems to cost next to nothing."""
    stretches = len(MODEL.times) + 1
    trace = MODEL.on(Clocks(device=(0.3 / stretches,) * stretches, host=(host / stretches,) * stretches))
    needed = needs(trace, PCIE_GEN5)
    found = offers(trace, needed, PCIE_GEN5, "auto", free=LAYOUTS)
    told = [line for line in render(trace, needed, found, "pages") if isinstance(line, str)]
    assert any("the GPU waits for the CPU" in line for line in told) is said


def test_the_table_ends_with_the_first_budget_that_is_too_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "trace.json").write_text(trace_json.write(MODEL))
    assert main(["suggest", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("does not fit") == 1
    assert out.count("suggested") == 2, "in its row, and below"
    (command,) = [line for line in out.splitlines() if "TIERS_HBM=" in line]
    told = json.loads(_json(tmp_path, capsys))
    assert f"TIERS_HBM={told['suggested'] // 2**20}MiB" in command
    assert max(map(len, out.splitlines())) <= 80


def test_the_command_is_for_the_allocator_that_the_run_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours needs a GPU."""
    (tmp_path / "trace.json").write_text(trace_json.write(MODEL))
    (tmp_path / "stats.json").write_text(json.dumps(STATS))
    assert main(["suggest", str(tmp_path)]) == 0
    assert "TIERS_ALLOCATOR=torch" in capsys.readouterr().out


@pytest.mark.parametrize("in_place", [7 * GiB, 0])
def test_where_optimizer_state_lay_in_dram_only_room_for_all_of_it_is_suggested(
    in_place: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What less of it there costs, no step of the run tells, though it was streamed."""
    (tmp_path / "trace.json").write_text(trace_json.write(MODEL))
    (tmp_path / "stats.json").write_text(
        json.dumps({**STATS, "demoted": 8 * GiB, "state_in_dram": 7 * GiB, "state_in_place": in_place})
    )
    for named in (tmp_path, tmp_path / "trace.json"):
        assert main(["suggest", str(named)]) == 0
        assert "7.0 GiB of optimizer state lay below hbm" in " ".join(capsys.readouterr().out.split())
        told = json.loads(_json(named, capsys))
        assert told["needs"] == needs(MODEL, PCIE_GEN5) + 8 * GiB
        assert [offer["planned"] for offer in told["offers"]] == [told["needs"]]
        assert told["suggested"] >= told["needs"]


def test_optimizer_state_on_nvme_is_part_of_what_a_program_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.json").write_text(trace_json.write(MODEL))
    (tmp_path / "stats.json").write_text(json.dumps({**STATS, "state_on_nvme": 7 * GiB}))
    assert main(["suggest", str(tmp_path)]) == 0
    assert "7.0 GiB of optimizer state lay below hbm" in " ".join(capsys.readouterr().out.split())
    assert json.loads(_json(tmp_path, capsys))["needs"] == needs(MODEL, PCIE_GEN5) + 7 * GiB


def test_where_nothing_fits_the_exit_code_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without room below HBM nothing can move, and this policy recomputes nothing."""
    full = replace(MODEL, others=tuple(100 * GiB for _ in MODEL.others), recipes={})
    (tmp_path / "trace.json").write_text(trace_json.write(full))
    assert main(["suggest", "--policy", "move", "--dram", "2MiB", str(tmp_path)]) == 1
    assert "none of these budgets is enough" in capsys.readouterr().out


def test_a_trace_without_times_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace.json").write_text(trace_json.write(replace(MODEL, times=(), seconds=0.0, clocks=None)))
    assert main(["suggest", str(tmp_path)]) == 2
    assert "has no times" in capsys.readouterr().err


def _json(directory: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["suggest", "--json", str(directory)]) == 0
    return capsys.readouterr().out
