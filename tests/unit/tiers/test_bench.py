"""`tiers bench`: one program at several budgets, side by side."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.by_hand import eventually
from tests.unit.tiers.test_cli import STATS
from torch_tiers.allocator.sizes import GiB
from torch_tiers.bench import ended_in_order
from torch_tiers.cli.main import main

SECONDS = {"all": 0.2, "20GiB": 0.25, "10GiB": 0.4}  # a step, by budget

PROGRAM = f"""
import json, os, pathlib, sys, time
stats = {STATS!r}
hbm = os.environ.get("TIERS_HBM")
stats["step_s"]["median"] = {SECONDS!r}[hbm]
if hbm in sys.argv[1:]:
    sys.exit(f"no room in {{hbm}}")
if "elsewhere" in sys.argv:
    os.chdir("/")
run = pathlib.Path(os.environ["TIERS_RUN"]) / os.environ.get("SUBDIRECTORY", "")
run.mkdir(exist_ok=True)
try:
    if "for-ever" in sys.argv:
        time.sleep(60)
    if "killed" in sys.argv:
        (run / "stats.json").write_text("{{")
        os.kill(os.getpid(), 9)
finally:
    (run / "stats.json").write_text(json.dumps(stats))
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A program that takes as long as it says, and fails at the budgets that are named to it."""
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "train.py").write_text(PROGRAM)
    return ["--", sys.executable, str(tmp_path / "train.py")]


def entries(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return told


def test_variants_are_measured_against_the_one_that_keeps_everything(
    program: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--json", "--hbm", "20GiB, 10GiB", *program]) == 0
    told = entries(capsys)
    assert [(run["policy"], run["hbm"]) for run in told] == [("keep", None), ("auto", "20GiB"), ("auto", "10GiB")]
    assert [run["fraction_of_ideal"] for run in told] == pytest.approx([1.0, 0.8, 0.5])


def test_every_policy_runs_at_every_budget(program: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--hbm", "20GiB,10GiB", "--policy", "auto,capuchin", "--no-ideal"]
    assert main(["bench", "--json", *words, *program]) == 0
    told = entries(capsys)
    assert [(run["hbm"], run["policy"]) for run in told] == [
        ("20GiB", "auto"),
        ("20GiB", "capuchin"),
        ("10GiB", "auto"),
        ("10GiB", "capuchin"),
    ]
    assert {run["fraction_of_ideal"] for run in told} == {None}


def test_the_table_has_a_row_for_each(program: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--hbm", "20GiB", *program]) == 0
    printed = capsys.readouterr().out
    assert "250.0 ms" in printed and "0.800" in printed


def test_a_run_that_took_more_than_its_budget_is_marked(program: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """As where there is no GPU: such a step is no result."""
    assert main(["bench", "--hbm", "20GiB", *program]) == 0
    assert "over" not in capsys.readouterr().out
    Path(program[-1]).write_text(PROGRAM.replace(str(15 * GiB), str(21 * GiB)))
    assert main(["bench", "--hbm", "20GiB", *program]) == 0
    assert "21.0 GiB, over" in capsys.readouterr().out


def test_one_that_fails_says_why_and_the_others_run_all_the_same(
    program: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--hbm", "10GiB,20GiB", *program, "10GiB"]) == 1
    printed = capsys.readouterr().out
    assert "auto at 10GiB ended with code 1: no room in 10GiB" in printed
    assert "250.0 ms" in printed


def test_a_program_that_trains_for_ever_is_interrupted(program: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--json", "--no-ideal", "--hbm", "20GiB", "--seconds", "6", *program, "for-ever"]) == 0
    (run,) = entries(capsys)
    assert not run["failed"] and run["stats"]["step_s"]["median"] == 0.25


def test_it_is_interrupted_also_behind_a_shell_s_ampersand(
    program: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the shell has this process ignore Ctrl-C, and those that it starts with it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        words = ["--json", "--no-ideal", "--hbm", "20GiB", "--seconds", "6"]
        assert main(["bench", *words, *program, "for-ever"]) == 0
    finally:
        signal.signal(signal.SIGINT, before)
    (run,) = entries(capsys)
    assert not run["failed"]


def test_one_that_is_killed_while_it_writes_its_numbers_has_none(
    program: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--json", "--no-ideal", "--hbm", "20GiB", *program, "killed"]) == 1
    (run,) = entries(capsys)
    assert run["failed"] and run["stats"] is None and run["code"] == -9


def test_of_several_ranks_the_first_speaks(
    program: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUBDIRECTORY", "rank0")
    assert main(["bench", "--json", "--no-ideal", "--hbm", "20GiB", *program]) == 0
    assert entries(capsys)[0]["stats"]["steps"] == STATS["steps"]


def test_run_directories_and_outputs_stay_where_they_are_asked_for(program: list[str], tmp_path: Path) -> None:
    assert main(["bench", "--hbm", "20GiB", "--out", str(tmp_path / "out"), *program]) == 0
    assert {path.name for path in (tmp_path / "out" / "1").iterdir()} == {"stats.json", "output.txt"}


def test_a_program_that_goes_to_another_directory_leaves_its_run_here(
    program: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--no-ideal", "--hbm", "20GiB", "--out", "out", *program, "elsewhere"]) == 0
    assert (tmp_path / "out" / "0" / "stats.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hbm", "lots"], "(--hbm)"),
        (["--hbm", "20GiB", "--policy", "capuchn"], "capuchin"),
        (["--hbm", "20GiB", "--out", "."], "is there already"),
        (["--hbm", "20GiB,"], "empty entry"),
    ],
)
def test_bad_input_is_one_line_before_anything_runs(
    program: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    (tmp_path / "train.py").unlink()  # nothing may try
    assert main(["bench", *words, *program]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize("command", [[], ["--", "no-such-program"]])
def test_a_program_is_needed(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--hbm", "20GiB", *command]) == 2
    assert "program" in capsys.readouterr().err


def test_a_switch_that_keeps_tiers_away_is_told_before_anything_runs(
    program: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert main(["bench", "--hbm", "20GiB", *program]) == 2
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in capsys.readouterr().err


def test_seconds_are_a_number(program: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--hbm", "20GiB", "--seconds", "soon", *program])
    assert "'soon' is not a number of seconds above 0" in capsys.readouterr().err


def test_workers_that_a_program_leaves_behind_do_not_run_beside_the_next(tmp_path: Path) -> None:
    worker = f"import pathlib, time; time.sleep(3); pathlib.Path({str(tmp_path / 'survived')!r}).touch()"
    leaves = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {worker!r}])"
    assert main(["bench", "--no-ideal", "--hbm", "20GiB", "--", sys.executable, "-c", leaves]) == 1  # it never stepped
    time.sleep(4)
    assert not (tmp_path / "survived").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_who_ends_the_bench_ends_its_program_and_leaves_nothing_behind(
    program: list[str], tmp_path: Path, number: signal.Signals
) -> None:
    """By default the signal ends this process alone, and the program would go on with the GPU."""
    (tmp_path / "train.py").write_text(
        f"import os, pathlib, time; pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch(); time.sleep(60)"
    )
    bench = subprocess.Popen(
        [sys.executable, "-m", "torch_tiers", "bench", "--hbm", "20GiB", *program],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # who runs the tests may ignore it
    )
    try:
        assert eventually(lambda: any(path.name.isdigit() for path in tmp_path.iterdir()))
        bench.send_signal(number)
        _, err = bench.communicate(timeout=60)
    finally:
        bench.kill()
        bench.communicate()
    assert bench.returncode == 128 + number
    assert "Traceback" not in err
    (child,) = (int(path.name) for path in tmp_path.iterdir() if path.name.isdigit())
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert not list(tmp_path.glob("tiers-bench-*"))


def test_a_bench_leaves_the_signals_as_they_were() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with ended_in_order():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
