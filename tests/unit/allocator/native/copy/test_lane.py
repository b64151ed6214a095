"""The native lane against a driver that is none: what it asks for, in what order."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.fake_driver import ROOT, asked, build
from torch_tiers.allocator.native.copy import lane

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("native"))


def test_a_copy_waits_then_copies_then_records(built: Path) -> None:
    program = """
source, target = ctypes.create_string_buffer(b"abcdefgh", 8), ctypes.create_string_buffer(8)
before = library.record(0, 7)
at, start = ctypes.addressof(target), ctypes.addressof(source)
done = library.copy(library.open(0), array("Q", [at, start + 4, 4, at + 4, start, 4]), [before])
assert not done.query()
done.synchronize()
assert target.raw == b"efghabcd" and done.query() and before.timed and not done.timed
"""
    assert asked(built, program) == [
        "context 1000",
        "create 1",
        "record 1 on 7",
        "101 waits for 1",
        "copies 4 4 on 101",
        "create 2 untimed",
        "record 2 on 101",
    ]


def test_a_copy_can_follow_a_stream_without_an_event_of_its_own(built: Path) -> None:
    program = "library.copy(library.open(0), array('Q'), [], 7)"
    assert asked(built, program)[1:] == [
        "create 1 untimed",
        "record 1 on 7",
        "101 waits for 1",
        "create 2 untimed",
        "record 2 on 101",
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


def test_a_stream_waits_without_an_event_of_its_own(built: Path) -> None:
    """Events that keep their time cost the stream more than the wait."""
    assert asked(built, "library.wait(0, 7, library.record(0, 9))")[3:] == ["7 waits for 1"]


def test_a_copy_of_nothing_tells_when_the_waits_are_over(built: Path) -> None:
    program = "before = library.record(0, 7); library.copy(library.open(0), array('Q'), [before])"
    assert asked(built, program)[3:] == ["101 waits for 1", "create 2 untimed", "record 2 on 101"]


def test_events_that_keep_their_time_and_those_that_do_not_have_pools_of_their_own(built: Path) -> None:
    program = """
out = library.open(0)
library.copy(out, array("Q"), [])
library.record(0, 9)
library.copy(out, array("Q"), [])
"""
    assert [line for line in asked(built, program) if line.startswith("create")] == ["create 1 untimed", "create 2"]


def test_a_copy_that_is_timed_begins_when_the_waits_are_over(built: Path) -> None:
    program = """
before, bytes_ = library.record(0, 7), ctypes.create_string_buffer(16)
at = ctypes.addressof(bytes_)
library.timed_copy(library.open(0), array("Q", [at + 8, at, 8]), [before])
"""
    assert asked(built, program)[3:] == [
        "101 waits for 1",
        "create 2",
        "record 2 on 101",
        "copy 8 on 101",
        "create 3",
        "record 3 on 101",
    ]


PIECES = """
fake.fake_batches({batches})
MiB = 1 << 20
source, target = (ctypes.create_string_buffer(40 * MiB) for _ in range(2))
ctypes.memset(source, 7, 40 * MiB)
spans, at = array("Q"), 0
for nbytes in {sizes}:
    spans.extend((ctypes.addressof(target) + at, ctypes.addressof(source) + at, nbytes * MiB))
    at += nbytes * MiB
library.copy(library.open({device}), spans, []).synchronize()
assert target.raw == source.raw
"""


LOG = "import logging; logging.basicConfig(stream=sys.stdout, format='%(message)s')"


def copies(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("cop")]


def pieces(sizes: list[int], *, batches: bool = True, device: int = 0) -> str:
    """A program that copies 40 MiB in pieces of so many MiB."""
    return PIECES.format(sizes=sizes, batches=batches, device=device)


@pytest.mark.parametrize("batches", [False, True])
def test_a_large_piece_leaves_in_several_calls(built: Path, batches: bool) -> None:
    """With both directions busy a call that goes on for long slows the other one down."""
    lines = asked(built, pieces([40], batches=batches))
    assert copies(lines) == ["copy 33554432 on 101", "copy 8388608 on 102"]


def test_pieces_share_calls_as_long_as_these_stay_short(built: Path) -> None:
    lines = asked(built, pieces([16, 16, 3, 5]))
    assert copies(lines) == ["copies 16777216 16777216 on 101", "copies 3145728 5242880 on 102"]


@pytest.mark.parametrize(("batches", "device"), [(False, 0), (True, 1)])
def test_where_batches_do_not_work_each_copy_is_a_call_of_its_own(built: Path, batches: bool, device: int) -> None:
    """The driver refuses them, or would not find registered host memory at the address that it is given."""
    lines = asked(built, pieces([8] * 5, batches=batches, device=device))
    assert copies(lines) == ["copy 8388608 on 101"] * 4 + ["copy 8388608 on 102"]


def test_what_a_batch_is_refused_for_is_copied_one_by_one(built: Path) -> None:
    """Such as host memory that could not be pinned."""
    program = """
source, target = ctypes.create_string_buffer(b"abcdefgh", 8), ctypes.create_string_buffer(8)
at, start = ctypes.addressof(target), ctypes.addressof(source)
fake.fake_refuse(1)
library.copy(library.open(0), array("Q", [at, start + 4, 4, at + 4, start, 4]), []).synchronize()
assert target.raw == b"efghabcd"
"""
    assert copies(asked(built, program)) == ["copy 4 on 101", "copy 4 on 101"]


def test_that_batches_are_refused_is_said_once_with_the_driver_s_reason(built: Path) -> None:
    program = pieces([8] * 5, batches=False)
    said = [line for line in asked(built, LOG + program + program) if "refused" in line]
    assert said == ["the CUDA driver refused several copies in one call with error 801: a call each takes 3 us longer"]


@pytest.mark.parametrize("device", [0, 1])
def test_where_batches_work_or_are_not_asked_for_nothing_is_said(built: Path, device: int) -> None:
    lines = asked(built, LOG + pieces([8] * 5, device=device))
    assert not any("refused" in line for line in lines)


def test_two_streams_of_a_lane_take_turns(built: Path) -> None:
    """A copy engine goes on with one as long as something is queued there, whoever else waits for it."""
    program = """
bytes_ = ctypes.create_string_buffer(64)
at = ctypes.addressof(bytes_)
out = library.open(0, turn=16)
for nbytes in (8, 8, 10, 10, 24, 8):
    library.copy(out, array("Q", [at + 32, at, nbytes]), [])
"""
    lines = asked(built, program)
    assert [line for line in lines if line.startswith("copy") or "waits" in line] == [
        "copy 8 on 101",
        "copy 8 on 101",
        "102 waits for 1",
        "copy 10 on 102",
        "101 waits for 1",
        "copy 10 on 101",
        "102 waits for 1",
        "copy 24 on 102",
        "101 waits for 1",
        "copy 8 on 101",
    ]


def test_no_call_has_more_copies_than_drivers_are_known_to_take(built: Path) -> None:
    program = """
bytes_ = ctypes.create_string_buffer(5000)
at = ctypes.addressof(bytes_)
library.copy(library.open(0), array("Q", [n for k in range(2500) for n in (at + 2500 + k, at + k, 1)]), [])
"""
    assert [line.split().count("1") for line in copies(asked(built, program))] == [1024, 1024, 452]


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
begin, done = library.timed_copy(library.open(0), array("Q"), [before])
assert not done.query()
done.synchronize()
assert begin.elapsed_time(done) > 0
assert not fake.fake_spoilt()
mode = ctypes.c_int(1)
fake.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
assert mode.value == 0  # as it was
"""
    asked(built, program)


def test_what_the_driver_refuses_is_an_exception_that_names_its_error(built: Path) -> None:
    program = """
fake.fake_refuse(1)
out = library.open(0)
for refused in (lambda: library.copy(out, array("Q", [1, 1, 8]), []), lambda: library.record(5, 7)):
    try:
        refused()
    except lane.DriverError as error:
        flush(); print(error)
"""
    lines = asked(built, program)
    told = [line for line in lines if line.startswith("the CUDA driver answered")]
    assert [line.partition(". ")[0] for line in told] == [
        "the CUDA driver answered with error 700 (CUDA_ERROR_FAKE)",
        "the CUDA driver answered with error 101 (CUDA_ERROR_FAKE)",
    ]
    assert all("CUDA_LAUNCH_BLOCKING=1" in line for line in told)


STORM = """
import random
BLOCK = 1 << 16
memory = ctypes.create_string_buffer(8 * BLOCK)
pattern = -(-ctypes.addressof(memory) // 512) * 512
sources, blocks = (pattern + k * BLOCK for k in (3, 5))
out, back = (library.open(0, turn) for turn in (BLOCK // 3, 3 * BLOCK))

def write(target, source):
    fake.cuMemcpyAsync(*map(ctypes.c_uint64, (target, source)), ctypes.c_size_t(BLOCK), ctypes.c_void_p(7))

def laid_out(rng, k):
    spans, offset, target, source = array("Q"), 0, blocks + k % 2 * BLOCK, sources + k % 2 * BLOCK
    for _ in range(rng.randrange(1, 24)):
        nbytes = rng.choice((rng.randrange(1, 600), rng.randrange(1, 2049), 2048, rng.randrange(2049, 6000)))
        if offset + nbytes > BLOCK: break
        spans.extend((target + offset, source + offset, nbytes))
        offset = -(-(offset + nbytes) // 512) * 512 + rng.choice((0, 0, 0, 512))
    return spans

def storm(seed):
    # As the engine works: stream 7 is the program, and the lane back reads a block before the next group is written
    # there. The program writes over its memory once a group has left it.
    rng = random.Random(seed)
    fake.fake_seed(seed + 1)
    left, read, expected = {}, {}, []
    for k in range(3):
        ctypes.memmove(pattern + k * BLOCK, rng.randbytes(BLOCK), BLOCK)
    for k in range(12):
        source, block = sources + k % 2 * BLOCK, blocks + k % 2 * BLOCK
        if k % 2 in left:
            library.follow(0, 7, left.pop(k % 2))
        write(source, pattern + k % 3 * BLOCK)
        spans = laid_out(rng, k)
        after = [read[k % 2]] if k % 2 in read else []
        send = rng.choice((library.copy, lambda *all: library.timed_copy(*all)[1]))
        done = left[k % 2] = send(out, spans, after, 7)
        coming = array("Q")
        for target, start, nbytes in zip(*[iter(spans)] * 3):
            result = (ctypes.c_char * nbytes)()
            coming.extend((ctypes.addressof(result), target, nbytes))
            expected.append((result, ctypes.string_at(pattern + k % 3 * BLOCK + start - source, nbytes)))
        read[k % 2] = library.copy(back, coming, [done])
        for _ in range(rng.randrange(4)):
            fake.fake_go_on()
    library.copy(back, array("Q"), [], 7).synchronize()
    assert all(result.raw == bytes_ for result, bytes_ in expected), f"seed {seed}"
"""


def test_every_byte_arrives_in_whatever_order_the_streams_get_on(built: Path) -> None:
    """Groups of random pieces, whose copies are carried out in any order; and events are used again and again."""
    program = """
for seed in range(400):
    storm(seed)
assert fake.fake_events() < 100, fake.fake_events()
"""
    assert any(line.startswith("copies") for line in asked(built, STORM + program))


def test_after_an_error_nothing_is_under_way_and_no_event_is_lost(built: Path) -> None:
    """Whichever call of the driver fails: the memory may be given to others at once, and the next group arrives."""
    program = """
storm(0)
failed, before = 0, fake.fake_events()
for call in range(1, 200):
    rng = random.Random(call)
    write(sources, pattern)
    reader = library.copy(back, array("Q"), [])
    fake.fake_refuse(call % 6 + 1)
    try:
        rng.choice((library.copy, library.timed_copy))(out, laid_out(rng, 0), [reader], 7)
    except lane.DriverError:
        failed += 1
        assert fake.fake_pending(101) == fake.fake_pending(102) == 0, call
    fake.fake_refuse(0)
    if call % 20 == 0:
        storm(call)
assert failed > 50 and fake.fake_events() <= before + 8, (failed, before, fake.fake_events())
"""
    asked(built, STORM + program)


def test_without_the_library_or_the_driver_it_is_an_error_that_says_what_to_install(
    built: Path, tmp_path: Path
) -> None:
    with pytest.raises(lane.NoLane, match=r"cannot be loaded .*liblane.so.* no C.. compiler; install it again"):
        lane.load(tmp_path / "liblane.so")
    code = """
import sys, pathlib
from torch_tiers.allocator.native.copy import lane
try:
    lane.load(pathlib.Path(sys.argv[1]))
except lane.NoLane as missing:
    print(missing)
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code, str(built / "liblane.so")], env=environ, capture_output=True, text=True, check=True
    )
    if not Path("/dev/nvidiactl").exists():
        assert done.stdout.startswith("libcuda.so.1 was not found")
