"""``tiers top``."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from tests.unit.monitors import Clock, Spoken, iteration, watch
from torch_tiers import places
from torch_tiers.allocator.host.ledger import Ledger
from torch_tiers.allocator.sizes import GiB, MiB
from torch_tiers.cli import top as top_verb
from torch_tiers.cli.main import main
from torch_tiers.cli.top_tables import brief, others, render, use
from torch_tiers.monitor.board import Board
from torch_tiers.monitor.sensors import Reading

RUN = {
    "hbm": 20 * GiB,
    "hbm_budget": 24 * GiB,
    "dram": 9 * GiB,
    "dram_budget": 64 * GiB,
    "nvme": 0,
    "nvme_budget": 0,
    "steps": 100,
    "iterations": 200,
    "step_s": 0.4,
    "ideal_s": 0.16,
    "predicted_s": 0.19,
    "rank": 3,
}


@pytest.fixture
def nothing_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that programs show themselves in where nobody names another."""
    monkeypatch.delenv("TIERS_LEDGER")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setattr(places, "LEDGERS", (tmp_path,))
    return tmp_path / f"tiers-{os.geteuid()}"


@pytest.fixture
def shown(nothing_named: Path) -> Board:
    """The board of a program beside a load."""
    directory = nothing_named
    directory.mkdir()
    clock = Clock()
    watched = watch(Spoken(lambda: Reading(0.0, {"own": 1.0, "tree": 7.5, "others": 0.2})), clock=clock)
    for k, left in enumerate([1.0] * 5 + [0.5] * 10):
        iteration(watched, clock, left, moved=k * 2_500_000_000)
    board = Board(directory)
    board.write({"pid": 4711, "at": 0.0, "program": "train.py --fast", "run": RUN, **watched.state()})
    return board


def test_top_shows_lanes_traffic_verdict_and_what_was_done(shown: Board, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "4711 (rank 3): train.py --fast" in out
    assert "memory bus saturated, by whom is unknown, 50% of the bus left" in out
    assert "backed off to 25%: 8 groups ahead, plans count on what is left" in out
    assert "2.5 GB/s" in out
    assert "7.5 workers" in out
    shown.close()


def test_top_shows_what_is_in_use_of_each_tier_and_how_fast_the_program_is(
    shown: Board, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step of 0.4 s has two iterations here, of 0.16 s each with everything kept."""
    assert main(["top", "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "hbm 20.0 GiB of 24.0 GiB, dram 9.0 GiB of 64.0 GiB" in lines
    assert "steps of 400.0 ms, 0.80 of the speed that is predicted with all memory" in lines
    shown.close()


@pytest.mark.parametrize(
    ("run", "line"),
    [
        ({"step_s": None}, "no step is timed yet"),
        ({"ideal_s": None, "predicted_s": None}, "steps of 400.0 ms"),
        ({"predicted_s": 0.32}, "steps of 400.0 ms, 0.50 of the speed that is predicted with all memory"),
        (
            {"ideal_s": 0.3, "predicted_s": 0.2},
            "steps of 400.0 ms, 1.00 of the speed that is predicted with all memory",
        ),
        ({"step_s": 2.5}, "steps of 2.50 s, 0.13 of the speed that is predicted with all memory"),
    ],
)
def test_the_speed_is_told_as_far_as_it_is_known_by_the_rules_of_the_report(
    shown: Board, run: dict[str, float | None], line: str
) -> None:
    (program,) = top_verb._programs()
    assert line in list(render([program | {"run": RUN | run}]))
    shown.close()


@pytest.mark.parametrize(("budget", "shown_too"), [(0, False), (GiB, True)])
def test_lanes_of_a_drive_are_shown_where_there_is_one(shown: Board, budget: int, shown_too: bool) -> None:
    (program,) = top_verb._programs()
    program = program | {"run": RUN | {"nvme_budget": budget}, "values": {"d2h.moved": 1e9, "disk_write.moved": 0.0}}
    (lanes,) = (part for part in render([program]) if isinstance(part, Table))
    assert ("disk_write" in list(lanes.columns[0].cells)) == shown_too
    shown.close()


def test_a_program_that_shows_no_run_is_one_with_an_earlier_version(shown: Board) -> None:
    (program,) = top_verb._programs()
    del program["run"]
    assert next(iter(render([program]))) == "4711: train.py --fast"
    Console(width=80).print(use([program]))
    shown.close()


def test_of_many_programs_each_has_its_lines_in_80_columns(shown: Board, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = top_verb._programs()
    program |= {"pid": 1234567, "program": "examples/train_gpt.py --preset 1.3b " * 5}
    large = {f"{tier}{what}": 1999 * GiB for tier in ("hbm", "dram", "nvme") for what in ("", "_budget")}
    program["run"] |= large | {"rank": 1023}
    Console(width=80).print(use([program] * 8), brief([program] * 8))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) == 2 * (8 + 2)
    row = next(line for line in lines if "1023" in line)
    assert "1999.0/1999.0" in row and "400.0 ms" in row and "0.80" in row
    shown.close()


def test_top_says_who_else_holds_host_memory_of_the_node(
    shown: Board, nothing_named: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["other.py"])
    nothing_named.chmod(0o700)
    account = Ledger(nothing_named).open_account("dram", GiB)
    account.claim(64 * MiB)
    before = sorted(path.name for path in nothing_named.iterdir())
    assert main(["top", "--once"]) == 0
    assert "64.0 MiB by this process" in " ".join(capsys.readouterr().out.split())
    assert main(["top", "--json"]) == 0
    held = json.loads(capsys.readouterr().out)["host_memory"]
    assert held == [{"pid": os.getpid(), "program": "other.py", "bytes": 64 * MiB}]
    assert sorted(path.name for path in nothing_named.iterdir()) == before
    (holder,) = top_verb._holders()
    assert list(others([{"pid": os.getpid()}], [holder])) == []  # whose own line has it
    account.release(64 * MiB)
    shown.close()


def test_top_as_json_is_the_state(shown: Board, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--json"]) == 0
    (program,) = json.loads(capsys.readouterr().out)["programs"]
    assert program["verdict"]["state"] == "saturated"
    assert program["response"]["plan"]["h2d"] == pytest.approx(0.5, abs=0.1)
    assert program["sensors"] == ["copies", "spoken"]
    shown.close()


def test_top_looks_where_the_ledger_is_named(
    shown: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(places, "LEDGERS", (tmp_path / "nowhere",))
    monkeypatch.setenv("TIERS_LEDGER", str(tmp_path / f"tiers-{os.geteuid()}"))
    assert main(["top", "--once"]) == 0
    assert "4711" in capsys.readouterr().out
    shown.close()


def test_top_looks_once_where_nobody_would_see_it_refreshed(shown: Board, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top"]) == 0
    assert capsys.readouterr().out.count("4711 (rank 3): train.py --fast") == 1
    shown.close()


def test_top_looks_once_at_a_terminal_that_only_prints(
    shown: Board, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # passes for a terminal
    monkeypatch.setenv("TERM", "dumb")
    assert main(["top"]) == 0
    assert capsys.readouterr().out.count("4711 (rank 3): train.py --fast") == 1
    shown.close()


def test_of_many_programs_top_shows_a_line_each(shown: Board, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = top_verb._programs()
    Console(width=200).print(brief([program] * 8))
    lines = [line for line in capsys.readouterr().out.splitlines() if "4711" in line]
    assert len(lines) == 8
    assert all(word in lines[0] for word in ("train.py --fast", "by whom is unknown", "2.5 GB/s", "backed off to 25%"))
    shown.close()


def test_top_ends_as_the_other_verbs_where_its_terminal_is_gone(
    shown: Board, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def gone(self: object, *what: object, **how: object) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    monkeypatch.setenv("FORCE_COLOR", "1")  # passes for a terminal
    monkeypatch.setattr(top_verb.Live, "update", gone)
    stdout = os.dup(1)  # what is left of the output is thrown away, and the tests after this one have some to say
    try:
        with pytest.raises(SystemExit) as ended:
            main(["top"])
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
    assert ended.value.code == 1
    assert capfd.readouterr().err == ""
    shown.close()


def test_top_looks_at_programs_also_where_none_could_begin(
    shown: Board, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIERS_NVME", "1GiB")
    monkeypatch.setenv("TIERS_NVME_PATH", "/no/such/directory")
    assert main(["top", "--once"]) == 0
    assert "4711" in capsys.readouterr().out
    shown.close()


def test_top_looks_first_into_the_directory_that_the_system_keeps_for_the_user(
    shown: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    board = Board(*places.boards(None))
    board.write({"pid": 1})
    assert (tmp_path / "run" / "tiers").stat().st_mode & 0o777 == 0o700
    assert [program["pid"] for program in top_verb._programs()] == [1, 4711]
    board.close()
    shown.close()


def test_a_runtime_directory_that_depends_on_where_one_is_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "here")
    assert places.boards(None)[0] == Path(f"/run/user/{os.geteuid()}/tiers")


def test_top_says_that_a_directory_it_was_told_of_is_not_the_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("TIERS_LEDGER", str(tmp_path))
    assert main(["top", "--once"]) == 2
    assert "is not private to this user; chmod go-w it" in capsys.readouterr().err


def test_top_passes_over_a_directory_that_somebody_else_has_made_in_our_place(
    nothing_named: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing_named.mkdir()
    nothing_named.chmod(0o777)
    assert main(["top", "--once"]) == 0
    assert "no program" in capsys.readouterr().out


def test_top_says_when_there_is_nothing(nothing_named: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once"]) == 0
    assert "no program" in capsys.readouterr().out
