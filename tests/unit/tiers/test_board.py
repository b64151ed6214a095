"""Where the state of the monitors is shown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.by_hand import eventually
from tests.unit.monitors import watch
from torch_tiers.monitor.board import Board, read_all
from torch_tiers.monitor.thread import Monitor


def test_a_board_shows_the_last_state_and_goes_with_its_process(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.write({"pid": 1, "text": "long" * 100})
    board.write({"pid": 1})
    assert read_all(tmp_path) == [{"pid": 1}]
    board.close()
    board.close()
    assert list(tmp_path.iterdir()) == []


def test_boards_are_private(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.write({})
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    board.close()


def test_what_the_dead_leave_is_removed(tmp_path: Path) -> None:
    code = "import os, sys, pathlib; from torch_tiers.monitor.board import Board\n"
    code += "Board(pathlib.Path(sys.argv[1])).write({'pid': 7}); os._exit(1)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    assert read_all(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_new_board_removes_what_the_dead_leave(tmp_path: Path) -> None:
    (tmp_path / "monitor-1-dead").write_text("{}")
    board = Board(tmp_path)
    board.write({})
    assert len(list(tmp_path.iterdir())) == 1
    board.close()


def test_a_fork_neither_keeps_nor_removes_its_parents_board(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.write({"pid": 1})
    if (child := os.fork()) == 0:
        board.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert read_all(tmp_path) == [{"pid": 1}]
    board.close()


def test_a_board_that_is_no_state_is_passed_over(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.write({})
    assert board._file is not None
    os.pwrite(board._file, b"[1,", 0)
    assert read_all(tmp_path) == []
    board.close()


def test_where_nobody_can_write_the_monitor_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = Monitor(watch(), Board(tmp_path / "nowhere"))
    monitor.period_over([], {})
    assert eventually(lambda: monitor.watch.steps > 0)
    monitor.close()
    assert not caplog.records
