"""The native lane against a driver that is none: what it asks for, in what order."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from allocator.native import lane
from tests.unit.fake_driver import ROOT, asked, build

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("native"))


def test_a_copy_waits_then_copies_then_records(built: Path) -> None:
    program = """
source, target = ctypes.create_string_buffer(b"abcdefgh", 8), ctypes.create_string_buffer(8)
before = library.record(0, 7)
at, start = ctypes.addressof(target), ctypes.addressof(source)
done = library.copy(0, 9, array("Q", [at, start + 4, 4, at + 4, start, 4]), [before])
assert not done.query()
done.synchronize()
assert target.raw == b"efghabcd" and done.query() and before.timed and not done.timed
"""
    assert asked(built, program) == [
        "context 1000",
        "create 1",
        "record 1 on 7",
        "9 waits for 1",
        "copies 4 4 on 9",
        "create 2 untimed",
        "record 2 on 9",
    ]


def test_a_copy_can_follow_a_stream_without_an_event_of_its_own(built: Path) -> None:
    program = "library.copy(0, 9, array('Q'), [], 7)"
    assert asked(built, program)[1:] == [
        "create 1 untimed",
        "record 1 on 7",
        "9 waits for 1",
        "create 2 untimed",
        "record 2 on 9",
    ]


def test_a_stream_that_waits_tells_when_it_got_there_and_when_it_went_on(built: Path) -> None:
    program = """
before = library.record(0, 9)
reached, on = library.follow(0, 7, before)
on.synchronize()
assert before.query() and reached.elapsed_time(on) > 0
assert library.follow(0, 7, before) is None
"""
    assert asked(built, program)[3:] == ["create 2", "record 2 on 7", "7 waits for 1", "create 3", "record 3 on 7"]


def test_a_copy_of_nothing_tells_when_the_waits_are_over(built: Path) -> None:
    program = "before = library.record(0, 7); library.copy(0, 9, array('Q'), [before])"
    assert asked(built, program)[3:] == ["9 waits for 1", "create 2 untimed", "record 2 on 9"]


def test_events_that_keep_their_time_and_those_that_do_not_have_pools_of_their_own(built: Path) -> None:
    program = """
library.copy(0, 9, array("Q"), [])
library.record(0, 9)
library.copy(0, 9, array("Q"), [])
"""
    assert [line for line in asked(built, program) if line.startswith("create")] == ["create 1 untimed", "create 2"]


def test_a_copy_that_is_timed_begins_when_the_waits_are_over(built: Path) -> None:
    program = """
before, bytes_ = library.record(0, 7), ctypes.create_string_buffer(16)
at = ctypes.addressof(bytes_)
library.timed_copy(0, 9, array("Q", [at + 8, at, 8]), [before])
"""
    assert asked(built, program)[3:] == [
        "9 waits for 1",
        "create 2",
        "record 2 on 9",
        "copy 8 on 9",
        "create 3",
        "record 3 on 9",
    ]


LARGE = """
fake.fake_batches({batches})
source, target = (ctypes.create_string_buffer(40 << 20) for _ in range(2))
ctypes.memset(source, 7, 40 << 20)
library.copy(0, 9, array("Q", [ctypes.addressof(target), ctypes.addressof(source), 40 << 20]), []).synchronize()
assert target.raw == source.raw
"""


def test_a_large_span_leaves_in_parts(built: Path) -> None:
    lines = asked(built, LARGE.format(batches=True))
    assert [line for line in lines if line.startswith("cop")] == ["copies 16777216 16777216 8388608 on 9"]


def test_where_the_driver_takes_one_copy_a_call_each_has_its_own(built: Path) -> None:
    lines = asked(built, LARGE.format(batches=False))
    assert [line for line in lines if line.startswith("cop")] == [
        "copy 16777216 on 9",
        "copy 16777216 on 9",
        "copy 8388608 on 9",
    ]


def test_events_come_from_a_pool_of_their_device(built: Path) -> None:
    program = """
for device in (0, 0, 1, 0):
    library.record(device, 7)
"""
    lines = asked(built, program)
    assert [line for line in lines if line.startswith(("create", "record"))] == [
        "create 1",
        "record 1 on 7",
        "record 1 on 7",
        "create 2",
        "record 2 on 7",
        "record 1 on 7",
    ]


def test_another_device_is_visited_and_left(built: Path) -> None:
    program = "a = library.record(0, 7); b = library.record(1, 7); c = library.record(0, 7)"
    assert [line for line in asked(built, program) if "context" in line] == [
        "context 1000",
        "context 1001",
        "context 1000",
    ]


def test_a_graph_that_another_thread_captures_is_not_spoilt_by_a_lane(built: Path) -> None:
    program = """
import threading
before = library.record(0, 8)
capture = threading.Thread(target=fake.fake_capture, args=(7, True)); capture.start(); capture.join()
reached, on = library.follow(0, 9, before)
begin, done = library.timed_copy(0, 9, array("Q"), [before])
assert not done.query()
done.synchronize()
assert begin.elapsed_time(done) > 0
assert library.staging(0, 20, 0, 1 << 20, 1 << 10) is not None
assert not fake.fake_spoilt()
mode = ctypes.c_int(1)
fake.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
assert mode.value == 0  # as it was
"""
    asked(built, program)


def test_what_the_driver_refuses_is_an_exception_that_names_its_error(built: Path) -> None:
    program = """
fake.fake_refuse(1)
for refused in (lambda: library.copy(0, 9, array("Q", [1, 1, 8]), []), lambda: library.record(5, 7)):
    try:
        refused()
    except lane.DriverError as error:
        flush(); print(error)
"""
    lines = asked(built, program)
    assert "the CUDA driver answered with error 700" in lines
    assert "the CUDA driver answered with error 101" in lines


def test_without_the_library_or_the_driver_there_is_none(built: Path, tmp_path: Path) -> None:
    assert lane.load(tmp_path / "liblane.so") is None
    code = (
        "import sys; from pathlib import Path; from allocator.native import lane; print(lane.load(Path(sys.argv[1])))"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code, str(built / "liblane.so")], env=environ, capture_output=True, text=True, check=True
    )
    if not Path("/dev/nvidiactl").exists():
        assert done.stdout == "None\n"
