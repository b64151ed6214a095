"""Where the state of the monitors is shown."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.by_hand import eventually
from tests.unit.monitors import watch
from torch_tiers.migrator.telemetry.now import Now
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


def test_what_the_dead_leave_half_made_is_removed_and_what_is_being_made_is_not(tmp_path: Path) -> None:
    """A process that is killed before it has locked its file left that for ever."""
    left, being_made = tmp_path / "new-monitor-1-dead", tmp_path / "new-monitor-2-alive"
    left.touch()
    os.utime(left, (0, 0))
    being_made.touch()
    assert read_all(tmp_path) == []
    assert list(tmp_path.iterdir()) == [being_made]


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
    monitor = Monitor(watch(), Board(tmp_path / "nowhere" / "at all"))
    monitor.iteration_over([], {})
    assert eventually(lambda: monitor.watch.steps > 0)
    monitor.close()
    assert not caplog.records


def test_the_board_has_the_numbers_of_the_last_iteration_and_what_is_asked_for_beside(tmp_path: Path) -> None:
    monitor = Monitor(watch(), Board(tmp_path), beside=lambda: {"dram": 5})
    monitor.iteration_over([], {}, Now(hbm=7, step_s=0.5))
    assert eventually(lambda: [state["run"] for state in read_all(tmp_path)])
    (state,) = read_all(tmp_path)
    monitor.close()
    assert state["run"] == {**Now(hbm=7, step_s=0.5)._asdict(), "dram": 5}


# --------------------------------------------------------------------------------------- what is not ours alone


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory that everybody may write to, with what looks like a dead program's file."""
    place = tmp_path / "shared"
    place.mkdir()
    (place / "monitor-1-dead").write_text("{}")
    place.chmod(0o777)
    return place


def test_in_a_directory_that_others_may_write_to_nothing_is_shown_read_or_removed(shared: Path) -> None:
    with pytest.raises(PermissionError, match="not private"):
        Board(shared).write({})
    with pytest.raises(PermissionError, match="not private"):
        read_all(shared)
    assert os.listdir(shared) == ["monitor-1-dead"]


def test_in_somebody_elses_directory_nothing_is_shown_read_or_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "monitor-1-dead").write_text("{}")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="not private"):
        Board(tmp_path).write({})
    with pytest.raises(PermissionError, match="not private"):
        read_all(tmp_path)
    assert os.listdir(tmp_path) == ["monitor-1-dead"]


def test_through_a_link_nothing_is_shown_read_or_removed(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "monitor-1-dead").write_text("{}")
    link = tmp_path / "link"
    link.symlink_to("target")
    with pytest.raises(OSError, match=r"link"):
        Board(link).write({})
    assert read_all(link) == []
    assert os.listdir(tmp_path / "target") == ["monitor-1-dead"]


def test_a_board_whose_directory_was_replaced_removes_nothing_in_the_new_one(tmp_path: Path) -> None:
    place = tmp_path / "ours"
    board = Board(place)
    board.write({})
    (name,) = os.listdir(place)
    place.rename(tmp_path / "moved")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / name).write_text("")
    place.symlink_to("target")
    board.close()
    assert os.listdir(tmp_path / "target") == [name]


def test_what_is_no_file_of_ours_is_neither_opened_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("{}")
    os.mkfifo(tmp_path / "monitor-1-fifo")
    (tmp_path / "monitor-2-link").symlink_to("target")
    (tmp_path / "monitor-3-directory").mkdir()
    (tmp_path / "monitor-4-open").touch()
    (tmp_path / "monitor-4-open").chmod(0o666)
    before = sorted(os.listdir(tmp_path))
    assert read_all(tmp_path) == []
    assert sorted(os.listdir(tmp_path)) == before


def test_the_first_place_that_serves_is_taken(shared: Path, tmp_path: Path) -> None:
    board = Board(tmp_path / "nowhere" / "at all", shared, tmp_path / "ours", tmp_path / "later")
    board.write({"pid": 1})
    assert read_all(tmp_path / "ours") == [{"pid": 1}]
    assert (tmp_path / "ours").stat().st_mode & 0o777 == 0o700
    assert not (tmp_path / "later").exists()
    board.close()


def test_a_board_that_was_removed_with_its_directory_is_made_anew(tmp_path: Path) -> None:
    """As logind removes a user's runtime directory at the last logout, while programs go on."""
    board = Board(tmp_path / "runtime" / "tiers", tmp_path / "shared")
    (tmp_path / "runtime").mkdir()
    board.write({"pid": 1})
    shutil.rmtree(tmp_path / "runtime")
    board.write({"pid": 1})
    assert read_all(tmp_path / "shared") == [{"pid": 1}]
    board.close()
    assert os.listdir(tmp_path / "shared") == []
