"""What the native lane gathers, against a driver that is none: what it asks for, and that every byte arrives."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.fake_driver import ROOT, asked, build

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("native"))


GATHER = """
sizes = {sizes}
source, target = ctypes.create_string_buffer(1 << 20), ctypes.create_string_buffer(1 << 20)
start, at = (-(-ctypes.addressof(buffer) // 512) * 512 for buffer in (source, target))
ctypes.memmove(start, bytes(k * k % 251 for k in range(1 << 19)), 1 << 19)
spans, offsets, offset = array("Q"), [], 0
for nbytes in sizes:
    spans.extend((at + offset, start + offset + {skew}, nbytes))
    offsets.append(offset)
    offset = -(-(offset + nbytes) // 512) * 512 + {gap}
staging = library.staging({device}, 20, (-(-start // 512) + 1024) * 512, {room}, 4096)
assert (staging is None) is ({device} == 1)
fake.fake_refuse({refused})
copy = getattr(library, "{call}")
copy({device}, 9, spans, [library.record({device}, 7)], 8, staging)
library.copy({device}, 9, array("Q"), []).synchronize()
for offset, nbytes in zip(offsets, sizes):
    assert ctypes.string_at(at + offset, nbytes) == ctypes.string_at(start + offset + {skew}, nbytes)
"""


def gathered(
    built: Path,
    sizes: list[int],
    *,
    room: int = 1 << 19,
    skew: int = 0,
    gap: int = 0,
    device: int = 0,
    call: str = "copy",
    refused: int = 0,
) -> list[str]:
    """What the driver is asked for, but events it makes, for spans of these sizes side by side in their target.

    Lane 9 and stream 20 beside it copy once an event of stream 7, and all that stream 8 was given, are passed.
    """
    options = {"sizes": sizes, "room": room, "skew": skew, "gap": gap, "device": device}
    lines = asked(built, GATHER.format(**options, call=call, refused=refused))
    first = next(k for k, line in enumerate(lines) if line.endswith("on 8"))
    return [line for line in lines[first + 1 : -1] if not line.startswith("create")]


def copied(built: Path, sizes: list[int], **options: Any) -> list[str]:
    """What of that moves bytes."""
    return [line for line in gathered(built, sizes, **options) if line.startswith(("gather", "cop"))]


def test_small_spans_side_by_side_are_gathered_beside_the_lane_and_leave_as_one(built: Path) -> None:
    """The lane waits for the gathering, and through that for what the gathering waited for."""
    assert gathered(built, [100, 1000, 17]) == [
        "20 waits for 1",
        "20 waits for 2",
        "gather 3 on 20, 1 blocks of 256 each",
        "record 3 on 20",
        "9 waits for 3",
        "copy 1553 on 9",
        "record 4 on 9",
    ]


def test_what_leaves_by_itself_does_not_wait_for_what_is_gathered(built: Path) -> None:
    assert gathered(built, [8192, 100, 1000]) == [
        "9 waits for 1",
        "9 waits for 2",
        "copy 8192 on 9",
        "20 waits for 1",
        "20 waits for 2",
        "gather 2 on 20, 1 blocks of 256 each",
        "record 3 on 20",
        "9 waits for 3",
        "copy 1512 on 9",
        "record 4 on 9",
    ]


def test_a_timed_copy_begins_when_the_first_run_is_gathered(built: Path) -> None:
    assert gathered(built, [100, 100], call="timed_copy")[2:] == [
        "gather 2 on 20, 1 blocks of 256 each",
        "record 3 on 20",
        "9 waits for 3",
        "record 4 on 9",
        "copy 612 on 9",
        "record 5 on 9",
    ]


def test_runs_fill_one_half_of_the_staging_while_the_lane_sends_the_other(built: Path) -> None:
    """Each half is written again only when the lane has sent it, and no wait stands between two runs of one half."""
    assert gathered(built, [4096] * 6, room=1 << 14)[2:] == [
        "gather 2 on 20, 1 blocks of 256 each",
        "record 3 on 20",
        "9 waits for 3",
        "copy 8192 on 9",
        "record 4 on 9",  # the first half is sent
        "gather 2 on 20, 1 blocks of 256 each",
        "record 3 on 20",
        "9 waits for 3",
        "copy 8192 on 9",
        "record 5 on 9",  # the second
        "20 waits for 4",
        "gather 2 on 20, 1 blocks of 256 each",
        "record 3 on 20",
        "9 waits for 3",
        "copy 8192 on 9",
        "record 6 on 9",
    ]


def test_one_small_span_alone_is_not_gathered(built: Path) -> None:
    """Nor does it cost anything that there is a staging."""
    alone = ["9 waits for 1", "9 waits for 2", "copy 100 on 9", "record 3 on 9"]
    assert gathered(built, [100]) == alone
    assert copied(built, [8192, 100]) == ["copies 8192 100 on 9"]


def test_what_does_not_lie_side_by_side_is_not_gathered(built: Path) -> None:
    assert copied(built, [100, 200], gap=512) == ["copies 100 200 on 9"]


def test_what_is_not_aligned_to_the_kernels_words_is_not_gathered(built: Path) -> None:
    assert copied(built, [100, 200], skew=8) == ["copies 100 200 on 9"]


def test_a_run_takes_what_is_left_of_a_half_before_the_other_is_filled(built: Path) -> None:
    runs = [line.split(",")[0] for line in copied(built, [512] * 3 + [8192] + [512] * 3, room=1 << 12)]
    assert runs == ["gather 3 on 20", "copy 1536 on 9", "copy 8192 on 9", "gather 3 on 20", "copy 1536 on 9"]
    runs = [line.split(",")[0] for line in copied(built, [512] * 2 + [8192] + [512] * 4, room=1 << 12)]
    assert runs[3:] == ["gather 2 on 20", "copy 1024 on 9", "gather 2 on 20", "copy 1024 on 9"]


def test_what_exceeds_a_launch_is_gathered_by_several_and_leaves_as_one(built: Path) -> None:
    assert [line.split(",")[0] for line in copied(built, [16] * 130)] == [
        "gather 128 on 20",
        "gather 2 on 20",
        f"copy {129 * 512 + 16} on 9",
    ]


def test_where_the_driver_cannot_compile_the_kernel_spans_are_copied_as_they_lie(built: Path) -> None:
    assert copied(built, [100, 200], device=1) == ["copies 100 200 on 9"]


def test_when_the_driver_cannot_launch_it_spans_are_copied_after_what_was_launched(built: Path) -> None:
    """The first launch may still read its sources: the lane is done only when that is."""
    second_launch = 8  # two events were made and recorded by then, two waits asked for, and the first launch
    lines = gathered(built, [16] * 130, refused=second_launch)
    assert lines[2:5] == ["gather 128 on 20, 1 blocks of 256 each", "record 3 on 20", "9 waits for 3"]
    assert lines[5:-1] == [f"copies{' 16' * 130} on 9"]


STORM = """
import random
BLOCK = 1 << 16
memory = ctypes.create_string_buffer(9 * BLOCK)
pattern = -(-ctypes.addressof(memory) // 512) * 512
sources, blocks, room = (pattern + k * BLOCK for k in (3, 5, 7))
staging = library.staging(0, 20, room, 1 << 13, 2048)

def whole(target, source): return array("Q", [target, source, BLOCK])

def laid_out(rng, k):
    spans, offset, target, source = array("Q"), 0, blocks + k % 2 * BLOCK, sources + k % 2 * BLOCK
    for _ in range(rng.randrange(1, 24)):
        nbytes = rng.choice((rng.randrange(1, 600), rng.randrange(1, 2049), 2048, rng.randrange(2049, 6000)))
        if offset + nbytes > BLOCK: break
        spans.extend((target + offset, source + offset, nbytes))
        offset = -(-(offset + nbytes) // 512) * 512 + rng.choice((0, 0, 0, 512))
    return spans

def storm(seed):
    # As the engine works: stream 7 is the program, 9 the lane out with 20 beside it, and 11 the lane back, which reads
    # a block before the next group is written there. The program writes over its memory once a group has left it.
    rng = random.Random(seed)
    fake.fake_seed(seed + 1)
    left, read, expected = {}, {}, []
    for k in range(3):
        ctypes.memmove(pattern + k * BLOCK, rng.randbytes(BLOCK), BLOCK)
    for k in range(12):
        source, block = sources + k % 2 * BLOCK, blocks + k % 2 * BLOCK
        if k % 2 in left:
            library.follow(0, 7, left.pop(k % 2))
        library.copy(0, 7, whole(source, pattern + k % 3 * BLOCK), [])
        spans = laid_out(rng, k)
        after = [read[k % 2]] if k % 2 in read else []
        send = rng.choice((library.copy, lambda *all: library.timed_copy(*all)[1]))
        done = left[k % 2] = send(0, 9, spans, after, 7, staging)
        back = array("Q")
        for target, start, nbytes in zip(*[iter(spans)] * 3):
            result = (ctypes.c_char * nbytes)()
            back.extend((ctypes.addressof(result), target, nbytes))
            expected.append((result, ctypes.string_at(pattern + k % 3 * BLOCK + start - source, nbytes)))
        read[k % 2] = library.copy(0, 11, back, [done])
        for _ in range(rng.randrange(4)):
            fake.fake_go_on()
    library.copy(0, 11, array("Q"), [], 7).synchronize()
    assert all(result.raw == bytes_ for result, bytes_ in expected), f"seed {seed}"
"""


def test_every_byte_arrives_in_whatever_order_the_streams_get_on(built: Path) -> None:
    """Groups of random pieces through a small staging; and events are used again and again."""
    program = """
for seed in range(400):
    storm(seed)
assert fake.fake_events() < 100, fake.fake_events()
"""
    assert any(line.startswith("gather") for line in asked(built, STORM + program))


def test_after_an_error_nothing_is_under_way_and_no_event_is_lost(built: Path) -> None:
    """Whichever call of the driver fails: the memory may be given to others at once, and the next group arrives."""
    program = """
storm(0)
failed, before = 0, fake.fake_events()
for call in range(1, 200):
    rng = random.Random(call)
    library.copy(0, 7, whole(sources, pattern), [])
    reader = library.copy(0, 11, array("Q"), [])
    fake.fake_refuse(call % 50 + 1)
    try:
        rng.choice((library.copy, library.timed_copy))(0, 9, laid_out(rng, 0), [reader], 7, staging)
    except lane.DriverError:
        failed += 1
        assert fake.fake_pending(9) == fake.fake_pending(20) == 0, call
    fake.fake_refuse(0)
    if call % 20 == 0:
        storm(call)
assert failed > 50 and fake.fake_events() <= before + 8, (failed, before, fake.fake_events())
"""
    asked(built, STORM + program)


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="no assembler for GPUs")
@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_the_gathering_kernel_assembles(tmp_path: Path, architecture: str) -> None:
    header = (ROOT / "allocator" / "native" / "gather.h").read_text()
    kernel = tmp_path / "gather.ptx"
    kernel.write_text(header.split('R"ptx(\n')[1].split(')ptx"')[0])
    subprocess.run(["ptxas", f"-arch={architecture}", str(kernel), "-o", str(kernel.with_suffix(".cubin"))], check=True)
