"""Files of a run directory, as `tiers plan` and `tiers report` read them: what is wrong is one line, exit code 2."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import torch_tiers as tiers
from tests.programs import PROGRAMS, build
from tests.unit.modelled import gpt
from tests.unit.numbers_of_a_run import STATS
from torch_tiers.allocator.sizes import GiB, MiB
from torch_tiers.cli import run_files
from torch_tiers.cli.main import main
from torch_tiers.cli.run_files import read_json
from torch_tiers.cli.verb import CliError
from torch_tiers.migrator.model import trace_json
from torch_tiers.migrator.model.links import PCIE_GEN5
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.planner.match import check_match
from torch_tiers.migrator.policies import POLICIES
from torch_tiers.planning.stats import stats_from_json

Change = Callable[[Any], object]


def put(*path: str | int, value: object) -> Change:
    def change(data: Any) -> None:
        for step in path[:-1]:
            data = data[step]
        data[path[-1]] = value

    return change


def drop(*path: str) -> Change:
    def change(data: Any) -> None:
        for step in path[:-1]:
            data = data[step]
        del data[path[-1]]

    return change


def one_line(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert main([*map(str, words)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("steps", value=-1), "steps is -1 and not a whole number"),
        (put("steps", value="ten"), "steps is 'ten' and not a whole number"),
        (put("device", value=None), "device is None and not a string"),
        (drop("peak", "hbm"), "peak.hbm is missing"),
        (put("peak", "tape", value=1), "budget.tape is missing"),
        (put("budget", "hbm", value=None), "budget.hbm is None and not a whole number"),
        (drop("budget", "nvme"), "budget.nvme is missing"),
        (put("moved", value=[]), "moved is a list and not an object"),
        (put("stalls", "d2h", value={"count": 1}), "stalls['d2h'].seconds is missing"),
        (put("step_s", "min", value="fast"), "step_s.min is 'fast' and not a number"),
        (drop("step_s", "settled"), "step_s.settled is missing"),
        (drop("settled", "moved", "h2d"), "settled.moved.h2d is missing"),
        (put("settled", "stalled_s", value={}), "settled.stalled_s.d2h is missing"),
        (put("pages", "dram", value=1 << 80), "pages.dram is 1208925819614629174706176 and not"),
        (drop("monitor"), "monitor is missing"),
        (put("monitor", "changes", value=[1]), "monitor.changes[0] is 1 and not a string"),
    ],
)
def test_stats_that_no_run_writes_are_refused_by_their_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Change, message: str
) -> None:
    stats = json.loads(json.dumps(STATS))
    stats_from_json(json.dumps(stats))
    change(stats)
    (tmp_path / "stats.json").write_text(json.dumps(stats))
    for words in (["report"], ["report", "--json"]):
        assert f"cannot be read: {message}" in one_line(capsys, *words, tmp_path)


@pytest.mark.parametrize("policy", ["auto", "move"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_a_run_writes_is_taken(tmp_path: Path, program: str, policy: str) -> None:
    with tiers.session(hbm="2MiB" if policy == "move" else "1GiB", dram="1GiB", run=tmp_path / "run", policy=policy):
        _, step = build(program, 0, "cpu")
        for number in range(5):
            step(number)
    read_json(tmp_path / "run/stats.json", stats_from_json)
    plan = read_json(tmp_path / "run/plan.json", Plan.from_json)
    check_match(plan, read_json(tmp_path / "run/trace.json", trace_json.read))
    assert policy == "auto" or plan.groups


@pytest.mark.parametrize("name", ["stats.json", "trace.json"])
@pytest.mark.parametrize("content", [b"[" * 1_000_000, b'{"seconds": NaN}', b"\xff\xfe", b"", b"null", b"1e999"])
def test_what_is_not_even_a_file_of_ours_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    words = ["report", tmp_path] if name == "stats.json" else ["plan", tmp_path / name, "--budget", "1GiB"]
    assert name in one_line(capsys, *words)


@pytest.mark.parametrize("name", ["trace.json.gz", "trace.json"])
def test_a_file_that_holds_more_than_any_run_writes_is_refused_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A few kilobytes may unpack to more than there is memory."""
    monkeypatch.setattr(run_files, "MOST_UNPACKED", 3 * MiB)
    file = tmp_path / name
    for nbytes, refused in ((3 * MiB, False), (3 * MiB + 1, True)):
        file.write_bytes(gzip.compress(b" " * nbytes) if file.suffix == ".gz" else b" " * nbytes)
        if refused:
            with pytest.raises(CliError, match=r"it holds more than 3\.0 MiB"):
                read_json(file, len)
        else:
            assert read_json(file, len) == nbytes


def test_a_plan_of_another_run_costs_the_account_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = POLICIES["auto"](gpt(blocks=6), 12 * GiB, PCIE_GEN5)
    (tmp_path / "stats.json").write_text(json.dumps(STATS))
    (tmp_path / "plan.json").write_text(plan.to_json())
    (tmp_path / "trace.json").write_text(trace_json.write(gpt(blocks=1)))
    assert main(["report", str(tmp_path)]) == 0
    assert "no account of the plan: " in capsys.readouterr().out
