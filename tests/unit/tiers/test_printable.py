"""What comes from files and other processes reaches a terminal as text, whatever is in it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from torch_tiers import places
from torch_tiers.autoload import gate
from torch_tiers.cli.main import main
from torch_tiers.cli.verb import print_json, print_tables
from torch_tiers.log import set_up
from torch_tiers.monitor.board import Board
from torch_tiers.printable import printable

HOSTILE = "a\x1b[2J\x07\x9b\x7f\rb\nc"
SHOWN = r"a\x1b[2J\x07\x9b\x7f\rb\nc"


MARKS = (0x061C, 0x200E, 0x200F)  # which turn the direction of writing at their place


def is_tame(text: str) -> bool:
    return all(printable(line) == line for line in text.split("\n"))


def test_what_controls_a_terminal_is_shown_as_python_writes_it() -> None:
    assert printable(HOSTILE) == SHOWN
    everything = map(chr, (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x202E, *MARKS, 0xD800, 0xDC80, 0xDFFF))
    assert all(printable(char).isascii() and printable(char).isprintable() for char in everything)


def test_all_else_stays_as_it_is() -> None:
    assert printable(text := r"C:\x1b: Zoë/模型 ─▶ █ 🙂") == text


def test_printed_twice_is_printed_once() -> None:
    assert printable(printable(HOSTILE)) == SHOWN


def in_a_cell(text: str) -> Table:
    table = Table(text, title=text)
    table.add_row(text)
    return table


@pytest.mark.parametrize("part", [str, Text, in_a_cell])
def test_tables_and_lines_control_no_terminal(
    part: Callable[[str], str | Text | Table], capsys: pytest.CaptureFixture[str]
) -> None:
    print_tables([part(HOSTILE)])
    out = capsys.readouterr().out
    assert r"a\x1b[2J" in out  # a Text leaves out some of the others by itself
    assert is_tame(out)


def test_a_table_stays_straight_around_what_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    print_tables([in_a_cell(HOSTILE)])
    title, *lines = capsys.readouterr().out.splitlines()
    assert SHOWN in title
    assert len({len(line) for line in lines}) == 1


def test_json_controls_no_terminal_and_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"name": HOSTILE})
    out = capsys.readouterr().out
    assert is_tame(out)
    assert json.loads(out) == {"name": HOSTILE}


def test_a_verb_s_error_is_one_line_that_controls_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / HOSTILE).mkdir()
    assert main(["report", str(tmp_path / HOSTILE)]) == 2
    err = capsys.readouterr().err
    assert SHOWN in err
    assert is_tame(err) and err.count("\n") == 1


def test_so_is_what_keeps_a_program_from_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIERS_ALLOCATOR", "torch")
    monkeypatch.setenv("TIERS_CONFIG", str(tmp_path / HOSTILE))
    with pytest.raises(SystemExit):
        gate()
    err = capsys.readouterr().err
    assert SHOWN in err
    assert is_tame(err) and err.count("\n") == 1


def test_a_key_of_somebody_s_file_controls_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiers.toml").write_text('run = "\\u001b[2J\\nx"')
    monkeypatch.chdir(tmp_path)
    assert main(["config"]) == 0
    assert is_tame(capsys.readouterr().out)


def test_a_program_s_name_fakes_no_line_of_top(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TIERS_LEDGER")
    monkeypatch.setattr(places, "LEDGERS", (tmp_path,))
    verdict = {"state": "free", "cause": None, "bus": 1.0, "left": {}}
    state = {"verdict": verdict, "values": {}, "response": {"ahead": None}, "sensors": [], "changes": []}
    board = Board(*places.boards(None))
    board.write({"pid": 1, "program": HOSTILE, **state})
    assert main(["top", "--once"]) == 0
    out = capsys.readouterr().out
    assert f"1: {SHOWN}" in out
    assert is_tame(out)
    board.close()


def test_a_line_of_the_log_controls_no_terminal_and_a_traceback_keeps_its_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logging.getLogger("tiers")
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "level", log.level)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    set_up("warning")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("of %s", HOSTILE)
    first, *traceback = capsys.readouterr().err.splitlines()
    assert first == f"tiers: of {SHOWN}"
    assert traceback[-1] == "ValueError: why"
