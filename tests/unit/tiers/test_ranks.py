"""A run of several ranks: they stand beside each other, and nobody has to choose one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.modelled import gpt
from tests.unit.numbers_of_a_run import STATS
from torch_tiers.allocator.sizes import GiB
from torch_tiers.cli.main import main
from torch_tiers.migrator.model import trace_json
from torch_tiers.migrator.model.links import PCIE_GEN5
from torch_tiers.migrator.policies import POLICIES

MODEL = gpt(blocks=6)


def rank(directory: Path, **changed: Any) -> None:
    directory.mkdir(parents=True)
    (directory / "stats.json").write_text(json.dumps(STATS | changed))
    (directory / "trace.json").write_text(trace_json.write(MODEL))
    (directory / "plan.json").write_text(POLICIES["auto"](MODEL, 12 * GiB, PCIE_GEN5).to_json())


def step(seconds: float) -> dict[str, Any]:
    return STATS["step_s"] | {"median": seconds, "settled": {"median": seconds, "steps": 5}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of eleven ranks; rank 2 is the slowest, and rank 10 has the highest peak."""
    for number in range(11):
        peak = (17 if number == 10 else 15) * GiB
        seconds = 0.75 if number == 2 else 0.5
        rank(tmp_path / f"rank{number}", step_s=step(seconds), peak={"hbm": peak, "dram": GiB, "nvme": 0})
    return tmp_path


def test_the_report_has_each_rank_their_sums_and_the_slowest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert [line[0] for line in lines if line and line[0][:4] == "rank"] == ["rank", *(f"rank{i}" for i in range(11))]
    assert ["sum", "167.0", "GiB", "11.0", "GiB", "880.0", "GiB"] in lines
    words = " ".join(text.split())
    assert "steps differ by 250.0 ms from rank to rank, peaks of hbm by 2.0 GiB; of rank2, the slowest:" in words
    assert "step 750.0 ms" in words
    assert max(map(len, text.splitlines())) <= 80


def test_as_json_it_has_the_slowest_one_s_numbers_and_those_of_each(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["rank"], told["step_s"]["settled"]["median"]) == ("rank2", 0.75)
    assert len(told["ranks"]) == 11
    assert told["ranks"]["rank10"] == {
        "step_s": 0.5,
        "stalled_s": 0.02,
        "peak": {"hbm": 17 * GiB, "dram": GiB, "nvme": 0},
        "moved": 80 * GiB,
    }


def test_of_ranks_that_wait_for_each_other_the_slowest_is_the_one_that_stalls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank(tmp_path / "rank0")
    rank(tmp_path / "rank1", settled=STATS["settled"] | {"stalled_s": {"d2h": 0.4}})
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rank"] == "rank1"


def test_a_rank_s_own_directory_is_a_run_of_its_own(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run / "rank3")]) == 0
    assert "from rank to rank" not in capsys.readouterr().out


def test_suggest_plan_and_the_page_need_no_choosing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["suggest", str(run)]) == 0
    assert "TIERS_ALLOCATOR=torch" in capsys.readouterr().out  # as the ranks had it
    assert main(["plan", str(run), "--budget", "12GiB"]) == 0
    assert main(["report", str(run), "--modules"]) == 0
    pytest.importorskip("matplotlib")
    page = run / "report.html"
    assert main(["report", str(run), "-o", str(page)]) == 0
    assert "from rank to rank" in page.read_text()


def test_runs_beside_each_other_are_not_taken_for_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("monday", "tuesday"):
        rank(tmp_path / name)
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"is no run, but holds some; name one of {tmp_path}/monday, {tmp_path}/tuesday" in said


def test_processes_of_which_no_launcher_told_the_rank_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank(tmp_path / "process12")
    assert main(["report", str(tmp_path)]) == 2
    assert f"holds a directory for each process; name one of {tmp_path}/process12" in capsys.readouterr().err
