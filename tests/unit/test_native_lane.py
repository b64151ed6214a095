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
from array import array
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
done = library.copy(0, 9, array("Q", [at, start + 4, 4, at + 4, start, 4]), [before])
assert target.raw == b"efghabcd" and done.query() and before.timed and not done.timed
"""
    assert asked(built, program) == [
        "context 1000",
        "create 1",
        "record 1 on 7",
        "9 waits for 1",
        "copy 4 on 9",
        "copy 4 on 9",
        "create 2 untimed",
        "record 2 on 9",
    ]


def test_a_copy_can_follow_a_stream_without_an_event_of_its_own(built: Path) -> None:
    program = "library.copy(0, 9, array('Q'), [], 7)"
    assert asked(built, program)[1:] == ["create 1 untimed", "record 1 on 7", "9 waits for 1", "record 1 on 9"]


def test_a_stream_that_waits_tells_when_it_got_there_and_when_it_went_on(built: Path) -> None:
    program = """
before = library.record(0, 9)
assert library.follow(0, 7, before) is None
unrecorded = lane.Event(library, 0, 63)
reached, on = library.follow(0, 7, unrecorded)
assert reached.elapsed_time(on) == 1
"""
    assert asked(built, program)[3:] == ["create 2", "record 2 on 7", "7 waits for 63", "create 3", "record 3 on 7"]


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


GATHER = """
sizes = {sizes}
source, target = ctypes.create_string_buffer(1 << 20), ctypes.create_string_buffer(1 << 20)
start, at = (-(-ctypes.addressof(buffer) // 512) * 512 for buffer in (source, target))
ctypes.memmove(start, bytes(k * k % 251 for k in range(1 << 19)), 1 << 19)
staging = lane.Staging(4096, (-(-start // 512) + 1024) * 512, {room})
spans, offsets, offset = array("Q"), [], 0
for nbytes in sizes:
    spans.extend((at + offset, start + offset + {skew}, nbytes))
    offsets.append(offset)
    offset = -(-(offset + nbytes) // 512) * 512 + {gap}
prepared = library.prepare({device})
library.copy({device}, 9, spans, [], staging=staging)
for offset, nbytes in zip(offsets, sizes):
    assert ctypes.string_at(at + offset, nbytes) == ctypes.string_at(start + offset + {skew}, nbytes)
assert prepared is ({device} == 0)
"""


def gathered(
    built: Path, sizes: list[int], *, room: int = 1 << 19, skew: int = 0, gap: int = 0, device: int = 0
) -> list[str]:
    """What the driver is asked to copy for spans of these sizes, side by side in their target."""
    program = GATHER.format(sizes=sizes, room=room, skew=skew, gap=gap, device=device)
    return [line for line in asked(built, program) if line.startswith(("gather", "copy"))]


def test_small_spans_side_by_side_are_gathered_and_leave_as_one(built: Path) -> None:
    assert gathered(built, [8192, 100, 1000, 17]) == [
        "copy 8192 on 9",
        "gather 3 on 9, 1 blocks of 256 each",
        "copy 1553 on 9",
    ]


def test_a_large_span_leaves_in_parts(built: Path) -> None:
    program = """
source, target = (ctypes.create_string_buffer(40 << 20) for _ in range(2))
ctypes.memset(source, 7, 40 << 20)
library.copy(0, 9, array("Q", [ctypes.addressof(target), ctypes.addressof(source), 40 << 20]), [])
assert target.raw == source.raw
"""
    copied = [line for line in asked(built, program) if line.startswith("copy")]
    assert copied == ["copy 16777216 on 9", "copy 16777216 on 9", "copy 8388608 on 9"]


def test_one_small_span_alone_is_not_gathered(built: Path) -> None:
    assert gathered(built, [8192, 100]) == ["copy 8192 on 9", "copy 100 on 9"]


def test_what_does_not_lie_side_by_side_is_not_gathered(built: Path) -> None:
    assert gathered(built, [100, 200], gap=512) == ["copy 100 on 9", "copy 200 on 9"]


def test_what_is_not_aligned_to_the_kernels_words_is_not_gathered(built: Path) -> None:
    assert gathered(built, [100, 200], skew=8) == ["copy 100 on 9", "copy 200 on 9"]


def test_what_exceeds_the_staging_leaves_in_several_runs(built: Path) -> None:
    copied = gathered(built, [512, 512, 512, 512], room=1024)
    assert copied == ["gather 2 on 9, 1 blocks of 256 each", "copy 1024 on 9"] * 2


def test_what_exceeds_a_launch_leaves_in_several_runs(built: Path) -> None:
    assert [line.split(",")[0] for line in gathered(built, [16] * 130)] == [
        "gather 128 on 9",
        f"copy {127 * 512 + 16} on 9",
        "gather 2 on 9",
        "copy 528 on 9",
    ]


def test_where_the_driver_cannot_compile_the_kernel_each_span_is_a_copy(built: Path) -> None:
    assert gathered(built, [100, 200], device=1) == ["copy 100 on 9", "copy 200 on 9"]


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
for refused in (lambda: library.copy(0, 9, array("Q", [1, 1, 13]), []), lambda: library.record(5, 7)):
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


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="no assembler for GPUs")
@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_the_gathering_kernel_assembles(tmp_path: Path, architecture: str) -> None:
    header = (ROOT / "allocator" / "native" / "gather.h").read_text()
    kernel = tmp_path / "gather.ptx"
    kernel.write_text(header.split('R"ptx(\n')[1].split(')ptx"')[0])
    subprocess.run(["ptxas", f"-arch={architecture}", str(kernel), "-o", str(kernel.with_suffix(".cubin"))], check=True)
