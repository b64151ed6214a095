"""The native lane against a driver that is none: what it asks for, in what order."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from allocator.native import lane

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("native")
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    for source, target, visibility in (
        (ROOT / "allocator" / "native" / "lane.cpp", "liblane.so", "hidden"),  # as CMake builds it
        (ROOT / "tests" / "unit" / "fake_cuda.cpp", "libcuda.so.1", "default"),
    ):
        out = ["-o", str(directory / target), "-ldl"]
        subprocess.run(["g++", *flags, f"-fvisibility={visibility}", str(source), *out], check=True)
    return directory


START = """
import ctypes, sys
from pathlib import Path
from allocator.native import lane
library = lane.load(Path(sys.argv[1]) / "liblane.so")
def flush(): ctypes.CDLL(None).fflush(None)
"""


def asked(built: Path, program: str) -> list[str]:
    """What the driver was asked for, and what the program printed, in order."""
    done = subprocess.run(
        [sys.executable, "-u", "-c", START + program + "\nflush()", str(built)],
        env={**os.environ, "LD_LIBRARY_PATH": str(built), "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_copy_waits_then_copies_then_records(built: Path) -> None:
    program = """
source, target = ctypes.create_string_buffer(b"abcdefgh", 8), ctypes.create_string_buffer(8)
before = library.record(0, 7)
at, start = ctypes.addressof(target), ctypes.addressof(source)
done = library.copy(0, 9, [(at, start + 4, 4), (at + 4, start, 4)], [before])
assert target.raw == b"efghabcd" and done.query() and before.elapsed_time(done) == 1
"""
    assert asked(built, program) == [
        "context 1000",
        "create 1",
        "record 1 on 7",
        "9 waits for 1",
        "copy 4 on 9",
        "copy 4 on 9",
        "create 2",
        "record 2 on 9",
    ]


def test_a_copy_of_nothing_tells_when_the_waits_are_over(built: Path) -> None:
    program = "before = library.record(0, 7); library.copy(0, 9, [], [before])"
    assert asked(built, program)[3:] == ["9 waits for 1", "create 2", "record 2 on 9"]


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


def test_what_the_driver_refuses_is_an_exception_that_names_its_error(built: Path) -> None:
    program = """
for refused in (lambda: library.copy(0, 9, [(1, 1, 13)], []), lambda: library.record(5, 7)):
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
