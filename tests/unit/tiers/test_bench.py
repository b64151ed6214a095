"""`tiers bench`: one program as it is, under tiers and beside peers, in rounds."""

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
from tests.unit.numbers_of_a_run import STATS
from torch_tiers.allocator.sizes import GiB
from torch_tiers.bench.losses import PATTERN, apart, printed
from torch_tiers.bench.program import ended_in_order, step_of
from torch_tiers.cli.main import main
from torch_tiers.planning.html.speed import Point, speed

SECONDS = {"none": 0.2, "20GiB": 0.25, "10GiB": 0.4, str(15 * GiB): 0.3}  # a step, by budget

PROGRAM = f"""
import json, os, pathlib, sys, time
stats, hbm = {STATS!r}, os.environ.get("TIERS_HBM", "none")
stats["budget"]["hbm"] = 20 * {GiB}
run = pathlib.Path(os.environ["_TORCH_TIERS_WATCH"])
with open(run.parent / "order.txt", "a") as file:
    print(run.name, file=file)
around = os.environ.get("_TORCH_TIERS_AROUND", "")
seconds = 0.5 if around or "--checkpoint" in sys.argv else {SECONDS!r}[hbm]
if "too-large" in sys.argv and hbm == "none":
    raise type("OutOfMemoryError", (RuntimeError,), {{}})("CUDA out of memory. Tried to allocate 2.00 GiB")
print("step 1: loss 2.5")
print("step 2: loss", 2.0 if hbm not in sys.argv[1:] or "drifts" not in sys.argv else 2.1)
if hbm in sys.argv[1:] and "drifts" not in sys.argv:
    sys.exit(f"no room in {{hbm}}")
if "elsewhere" in sys.argv:
    os.chdir("/")
try:
    if "for-ever" in sys.argv:
        time.sleep(60)
    if "killed" in sys.argv and hbm != "none":
        os.kill(os.getpid(), 9)
finally:
    ranks = 2 if "ranks" in sys.argv else 1
    for rank in range(ranks):
        told = {{"rank": rank, "steps": 41, "step_s": [(rank + 1) * seconds] * 40, "torch": "2.13",
                "reserved": (25 + rank) * {GiB} if "gpu" in sys.argv and hbm == "none" else 0,
                "device": "H200" if "gpu" in sys.argv else "cpu", "compiles": "compiles" in sys.argv}}
        (run / f"watched-{{os.getpid()}}{{rank}}.json").write_text(json.dumps(told))
    if hbm != "none":
        (run / "stats.json").write_text(json.dumps(stats))
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A program that takes as long as it says, and fails at the budgets that are named to it."""
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "train.py").write_text(PROGRAM)
    return ["--", sys.executable, str(tmp_path / "train.py")]


def bench(*words: str | Path, code: int = 0) -> None:
    assert main(["bench", *map(str, words)]) == code


def entries(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    return {row["variant"]: row for row in json.loads(capsys.readouterr().out)}


# ----------------------------------------------------------------------------------------- what is compared


def test_variants_are_measured_against_the_program_as_it_is(
    program: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    bench("--json", "--hbm", "20GiB, 10GiB", *program)
    told = entries(capsys)
    assert list(told) == ["plain", "tiers auto at 20GiB", "tiers auto at 10GiB"]
    assert [row["fraction"]["median"] for row in told.values()] == pytest.approx([1.0, 0.8, 0.5])


def test_every_policy_runs_at_every_budget(program: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    bench("--json", "--rounds", "1", "--hbm", "20GiB,10GiB", "--policy", "auto,capuchin", *program)
    assert [(row["hbm"], row["policy"]) for row in entries(capsys).values()][1:] == [
        ("20GiB", "auto"),
        ("20GiB", "capuchin"),
        ("10GiB", "auto"),
        ("10GiB", "capuchin"),
    ]


def test_variants_take_turns_and_each_is_first_in_turn(program: list[str], tmp_path: Path) -> None:
    bench("--hbm", "20GiB,10GiB", "--out", tmp_path / "out", *program)
    order = (tmp_path / "out/order.txt").read_text().split()
    tiers = ["tiers-auto-at-20GiB", "tiers-auto-at-10GiB"]
    assert [name.partition("-")[2] for name in order] == ["plain", *tiers, *tiers, "plain", tiers[1], "plain", tiers[0]]


def test_a_budget_may_be_a_share_of_what_the_plain_program_takes(
    program: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    bench("--json", "--hbm", "60%", *program, "gpu")
    row = entries(capsys)["tiers auto at 60%"]
    assert (row["hbm"], row["step"]["median"]) == ("15.0 GiB", 0.3)


def test_without_a_gpu_there_is_no_share(program: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    bench("--hbm", "60%", *program, code=2)
    assert "60% of what?" in capsys.readouterr().err


def test_peers_are_run_where_they_can_be_had(program: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    bench("--json", "--rounds", "1", "--peers", "--hbm", "20GiB", *program, "gpu", "compiles")
    told = entries(capsys)
    assert [name for name, row in told.items() if row["kind"] == "peer"] == [
        "save_on_cpu",
        *(f"compiled, saves {share}%" for share in (70, 40, 0)),
    ]
    assert told["save_on_cpu"]["fraction"]["median"] == pytest.approx(0.4)
    assert (told["static split at 20GiB"]["policy"], told["static split at 20GiB"]["reason"]) == ("keep", "")


def test_peers_can_be_named(program: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    bench("--json", "--rounds", "1", "--peers", "save_on_cpu", "--hbm", "20GiB", *program, "gpu", "compiles")
    assert list(entries(capsys)) == ["plain", "tiers auto at 20GiB", "save_on_cpu"]
    bench("--peers", "unknown", "--hbm", "20GiB", *program, code=2)
    assert "'unknown' is no peer; there are save_on_cpu, compiled, static split" in capsys.readouterr().err


def test_a_peer_that_cannot_be_had_is_a_row_with_its_reason_and_no_failure(
    program: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    bench("--peers", "--hbm", "20GiB", *program)
    printed = capsys.readouterr().out
    assert "compiled, saves 40%: the program compiles nothing" in printed
    assert "static split at 20GiB: needs a GPU" in printed and "left out" in printed


def test_another_command_is_a_variant_and_runs_without_tiers(
    program: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = f"own checkpointing={sys.executable} {tmp_path / 'train.py'} --checkpoint"
    bench("--json", "--hbm", "20GiB", "--variant", own, *program)
    assert entries(capsys)["own checkpointing"]["fraction"]["median"] == pytest.approx(0.4)


def test_a_program_that_does_not_fit_has_its_variants_compared_with_each_other(
    program: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It is for such programs that people come."""
    bench("--hbm", "20GiB,10GiB", "--rounds", "2", "--peers", "--out", tmp_path / "out", *program, "too-large", code=1)
    said = capsys.readouterr().out
    assert "plain: ended with code 1: OutOfMemoryError: CUDA out of memory" in said
    assert "250.0 ms" in said and "400.0 ms" in said and "plain has none" in said
    assert "compiled, saves 40%: the plain program did not get so far" in said
    bench("--hbm", "60%", "--rounds", "1", *program, "too-large", code=2)
    assert "60% of what?" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------- what is told


def test_the_table_has_a_row_for_each_with_its_spread(program: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    bench("--hbm", "20GiB", *program)
    printed = capsys.readouterr().out
    assert "250.0 ms" in printed and "0.800" in printed
    text = Path(program[-1]).read_text()
    Path(program[-1]).write_text(text.replace("* seconds]", '* (seconds + (run.name[0] == "1") / 8)]'))
    bench("--hbm", "20GiB", *program)
    assert "250.0 ms (250.0 to 375.0)" in capsys.readouterr().out


def test_a_run_that_took_more_than_its_budget_is_marked(program: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """As where there is no GPU: such a step is no result."""
    bench("--hbm", "20GiB", *program)
    assert ", over" not in capsys.readouterr().out
    Path(program[-1]).write_text(PROGRAM.replace(str(15 * GiB), str(21 * GiB)))
    bench("--hbm", "20GiB", *program)
    assert "21.0 GiB of 20GiB, over" in capsys.readouterr().out


def test_losses_that_are_printed_are_compared(program: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    bench("--json", "--hbm", "20GiB,10GiB", *program, "drifts", "10GiB")
    assert [row["losses"] for row in entries(capsys).values()] == [
        "equal",
        "equal",
        "differ from the 2nd on, by up to 5.0e-02",
    ]
    bench("--json", "--rounds", "1", "--loss", r"accuracy (\S+)", "--hbm", "20GiB", *program)
    assert {row["losses"] for row in entries(capsys).values()} == {"none printed"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("step 3: loss 2.5 time 3.0 ms", [2.5]),
        ("{'loss': 2.25, 'grad_norm': 1.0}\n{'loss': '1e-3'}", [2.25, 1e-3]),
        ("50%|###  | 5/10 loss=0.5\r100%|#####| 10/10 loss=0.25", [0.5, 0.25]),
        ("Loss: -1.5 | train_loss 3.0 | losses 4.0", [-1.5]),
        ("a loss of 3", []),
    ],
)
def test_losses_are_found_as_programs_print_them(text: str, found: list[float]) -> None:
    assert printed(text, PATTERN) == found
    assert apart(found, found) is None


def test_a_step_is_not_what_one_hiccup_made_of_it() -> None:
    assert step_of([9.0] * 50 + [0.1] * 49 + [60.0]) == pytest.approx(0.1)
    assert step_of([0.1, 0.3] * 50) == pytest.approx(0.2)  # two optimizers take turns
    assert step_of([0.5]) == 0.5


def test_plans_that_changed_in_the_steps_that_count_are_marked(
    program: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    bench("--hbm", "20GiB", *program)  # five steps under the last plan
    assert "~0.800" in capsys.readouterr().out
    Path(program[-1]).write_text(PROGRAM.replace("'steps': 5}", "'steps': 25}"))
    bench("--hbm", "20GiB", *program)
    assert "~" not in capsys.readouterr().out


def test_the_figure_is_written_as_a_page_and_as_a_picture(program: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page, pictures = tmp_path / "bench.html", tmp_path / "pictures"
    bench("--hbm", "20GiB,10GiB", "-o", page, "--png", pictures, *program, "gpu")
    text = page.read_text()
    assert "<svg" in text and "tiers auto at 10GiB" in text and "train.py" in text
    assert [path.name for path in pictures.iterdir()] == ["speed.png"]


def test_without_memory_that_is_known_nothing_is_drawn() -> None:
    section = speed([Point("plain", "plain", "", None, 1.0, 1.0, 1.0)])
    assert section.figure is None and "nothing is drawn" in section.text[0]


# -------------------------------------------------------------------------------------------- what goes wrong


def test_one_that_fails_says_why_and_the_others_run_all_the_same(
    program: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    bench("--hbm", "10GiB,20GiB", *program, "10GiB", code=1)
    printed = capsys.readouterr().out
    assert "tiers auto at 10GiB: ended with code 1: no room in 10GiB" in printed
    assert "250.0 ms" in printed


def test_it_stops_where_the_program_fails_as_it_is(
    program: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench("--hbm", "20GiB", "--out", tmp_path / "out", *program, "none", code=1)
    err = capsys.readouterr().err
    assert "the program as it is ended with code 1: no room in none" in err and err.count("\n") == 1
    assert (tmp_path / "out/order.txt").read_text().split() == ["0-plain"]


def test_a_program_that_trains_for_ever_is_interrupted(program: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    bench("--json", "--rounds", "1", "--hbm", "20GiB", "--seconds", "3", *program, "for-ever")
    assert entries(capsys)["tiers auto at 20GiB"]["step"]["median"] == 0.25


def test_it_is_interrupted_also_behind_a_shell_s_ampersand(
    program: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the shell has this process ignore Ctrl-C, and those that it starts with it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        bench("--json", "--rounds", "1", "--hbm", "20GiB", "--seconds", "3", *program, "for-ever")
    finally:
        signal.signal(signal.SIGINT, before)
    assert not any(row["reason"] for row in entries(capsys).values())


def test_one_that_is_killed_says_by_what(program: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    bench("--json", "--hbm", "20GiB", *program, "killed", code=1)
    assert entries(capsys)["tiers auto at 20GiB"]["reason"] == "ended with code -9: step 2: loss 2.0"


def test_of_several_ranks_the_slowest_and_the_largest_count(
    program: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    bench("--json", "--hbm", "20GiB", *program, "ranks", "gpu")
    plain = entries(capsys)["plain"]
    assert (plain["step"]["median"], plain["memory"]) == (0.4, 26 * GiB)


# ------------------------------------------------------------------------------------------------- the directory


def test_the_same_command_goes_on_where_it_was_stopped(
    program: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--json", "--hbm", "10GiB,20GiB", "--out", tmp_path / "out", *program]
    bench("--rounds", "1", *words)
    first = entries(capsys)
    ran = (tmp_path / "out/order.txt").read_text().split()
    (tmp_path / "out/0-tiers-auto-at-20GiB/outcome.json").unlink()  # a run that was cut off
    bench("--rounds", "2", *words)
    again = (tmp_path / "out/order.txt").read_text().split()[len(ran) :]
    assert again == ["0-tiers-auto-at-20GiB", "1-tiers-auto-at-10GiB", "1-tiers-auto-at-20GiB", "1-plain"]
    assert entries(capsys)["tiers auto at 10GiB"] == first["tiers auto at 10GiB"]


def test_what_failed_is_run_again_on_request(
    program: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--json", "--rounds", "1", "--hbm", "10GiB", "--out", tmp_path / "out", *program]
    Path(program[-1]).write_text(PROGRAM.replace('"20GiB": 0.25, "10GiB"', "'10GiB'").replace("'10GiB'", "'0GiB'"))
    bench(*words, code=1)
    Path(program[-1]).write_text(PROGRAM)
    bench(*words, code=1)
    bench("--retry", *words)


def test_a_directory_is_of_one_program(program: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--rounds", "1", "--hbm", "20GiB", "--out", tmp_path / "out"]
    bench(*out, *program)
    bench(*out, *program, "gpu", code=2)
    assert "holds runs of another plain: name another directory" in capsys.readouterr().err


def test_a_program_that_goes_to_another_directory_leaves_its_run_here(
    program: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bench("--rounds", "1", "--hbm", "20GiB", "--out", "out", *program, "elsewhere")
    assert {"stats.json", "output.txt", "outcome.json"} <= {
        path.name for path in (tmp_path / "out/0-tiers-auto-at-20GiB").iterdir()
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hbm", "lots"], "(--hbm)"),
        (["--hbm", "0%"], "'0%' is no share"),
        (["--hbm", "20GiB", "--policy", "capuchn"], "capuchin"),
        (["--hbm", "20GiB", "--out", "."], "holds something else"),
        (["--hbm", "20GiB,"], "empty entry"),
        (["--hbm", "20GiB,20GiB"], "is there twice"),
        (["--hbm", "20GiB", "--variant", "python train.py"], "is not NAME=COMMAND"),
        (["--hbm", "20GiB", "--variant", "own='python"], "No closing quotation"),
        (["--hbm", "20GiB", "--variant", "own=no-such-program x"], "no-such-program: no such program"),
        (["--hbm", "20GiB", "-o", "nowhere/bench.html"], "nowhere is not a directory"),
    ],
)
def test_bad_input_is_one_line_before_anything_runs(
    program: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    (tmp_path / "train.py").unlink()  # nothing may try
    bench(*words, *program, code=2)
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize("command", [[], ["--", "no-such-program"]])
def test_a_program_is_needed(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    bench("--hbm", "20GiB", *command, code=2)
    assert "program" in capsys.readouterr().err


def test_a_switch_that_keeps_tiers_away_is_told_before_anything_runs(
    program: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    bench("--hbm", "20GiB", *program, code=2)
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seconds", "soon"], "'soon' is not a number of seconds above 0"),
        (["--rounds", "0"], "'0' is not a number of rounds, from 1 on"),
        (["--loss", "("], "is no regular expression"),
    ],
)
def test_options_are_checked(
    program: list[str], capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--hbm", "20GiB", *words, *program])
    assert message in capsys.readouterr().err


def test_workers_that_a_program_leaves_behind_do_not_run_beside_the_next(tmp_path: Path) -> None:
    worker = f"import pathlib, time; time.sleep(3); pathlib.Path({str(tmp_path / 'survived')!r}).touch()"
    leaves = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {worker!r}])"
    bench("--hbm", "20GiB", "--", sys.executable, "-c", leaves, code=1)  # it never stepped
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
