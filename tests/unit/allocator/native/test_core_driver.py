"""The core against a driver that is none: when it waits, what it waits for, and what becomes of what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.unit.fake_driver import asked, build

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("native"))


START = """
from torch_tiers.allocator.native import Core, CoreBusy
from torch_tiers.allocator.sizes import MiB
HBM, DRAM = 0, 1
core = Core("cuda", hbm=64 * MiB, dram=64 * MiB)

def work(stream):  # something for a stream to do that is not done before somebody waits
    library.record(0, stream); assert fake.fake_pending(stream)

def pending(): return sum(block["kind"] == 3 for block in core.blocks())
"""
END = "\nassert not fake.fake_contexts() and not fake.fake_spoilt()"


def holds(built: Path, program: str) -> None:
    """Run it; an assertion of its own or of the driver's fails."""
    asked(built, START + program + END)


def test_idle_pages_are_unmapped_when_their_stream_is_done(built: Path) -> None:
    holds(built, "core.free(core.allocate(8 * MiB, stream=7)); work(7); core.trim(); assert core.counts().hbm == 0")


FREED = """
core.free(core.allocate(MiB, stream=9))
block = core.allocate(8 * MiB, stream=7)
work(9)  # reads the block; stream 7 waits for it before it asks for more
core.free(block)
"""
ASKS = {
    "to give idle memory back": "core.trim()",
    "for another stream": "core.allocate(60 * MiB, stream=8)",
    "for a layout": "core.set_layout(*layout)",
    "for what is beside a layout": "core.trim_outside()",
}


@pytest.mark.parametrize("asked_for", ASKS)
def test_idle_pages_are_unmapped_when_no_stream_that_is_known_reads_them_any_more(built: Path, asked_for: str) -> None:
    """Whoever gave the block back need not have told us of the other stream, so long as its own waits for that.

    FSDP2 frees gradients while the optimizer reads them on another stream: unmapped, that was an illegal access.
    """
    layout = """
from torch_tiers.allocator.native.sequence_layout import SequenceLayout
import numpy as np
layout = [SequenceLayout(7, np.array([8 * MiB]), np.array([0], np.uint64), np.ones(4, np.int64))]
"""
    before = "core.set_layout(*layout)\n" if "beside" in asked_for else ""
    holds(built, layout + before + FREED + ASKS[asked_for] + "\nassert not fake.fake_pending(9)")


@pytest.mark.parametrize("stream", [7, 8], ids=["beside the region", "another stream's"])
def test_what_a_place_of_the_region_lacks_is_taken_when_nobody_reads_it_any_more(built: Path, stream: int) -> None:
    program = f"""
from torch_tiers.allocator.native.sequence_layout import SequenceLayout
import numpy as np
core.set_layout(SequenceLayout(7, np.array([8 * MiB]), np.array([0], np.uint64), np.ones(4, np.int64)))
core.mark()
core.free(core.allocate(MiB, stream=9))
block = core.allocate(60 * MiB, stream={stream})
work(9)  # reads it
core.free(block)
core.mark()
planned = core.allocate(8 * MiB, stream=7)
assert core.on(planned, HBM) == 8 * MiB and not fake.fake_pending(9)
core.free(planned)
core.free(core.allocate(60 * MiB, stream={stream}))
fake.fake_capture({stream}, True); core.capture(True)
core.mark()
planned = core.allocate(8 * MiB, stream=7)
assert core.on(planned, DRAM) > 0, "a graph may use what lies idle there"
"""
    holds(built, program)


def test_while_a_graph_is_captured_all_other_streams_are_waited_for(built: Path) -> None:
    program = """
core.allocate(MiB, stream=5)
fake.fake_capture(5, True); core.capture(True)
core.allocate(58 * MiB, stream=6)
assert not fake.fake_pending(9)
"""
    holds(built, FREED + program)


@pytest.mark.parametrize(
    ("given_back", "needed"),
    [
        ("core.allocate(8 * MiB, stream=8)", 24),
        ("core.allocate(60 * MiB, stream=8)", 16),  # which went to DRAM
        ("core.allocate(8 * MiB, stream=8); core.used_on(block, 9); work(9)", 24),  # and its free is pending
    ],
)
def test_what_other_streams_gave_back_is_needed_as_long_as_it_lies_in_hbm(
    built: Path, given_back: str, needed: int
) -> None:
    program = f"""
from torch_tiers.allocator.native.sequence_layout import SequenceLayout
import numpy as np
core.allocate(16 * MiB, stream=7)
core.set_layout(SequenceLayout(7, np.array([8 * MiB]), np.array([0], np.uint64), np.ones(4, np.int64)))
block = {given_back}
core.free(block); core.take_peak()
assert core.take_peak() == {needed} * MiB, core.take_peak()
library.record(0, 9).synchronize()
"""
    holds(built, program)


def test_streams_that_never_asked_for_memory_are_not_waited_for(built: Path) -> None:
    """What NCCL is to receive there may be sent after something that this very thread is yet to send."""
    program = """
core.free(core.allocate(8 * MiB, stream=7))
fake.fake_kernels(False)  # what is at work there reads nothing of this
work(3); core.trim()
assert fake.fake_pending(3) and core.counts().hbm == 0
library.record(0, 3).synchronize()
"""
    holds(built, program)


def test_a_block_moves_when_all_streams_are_done_with_it_and_its_bytes_are_there(built: Path) -> None:
    """Those, too, that never asked for memory: a copy of a checkpoint, say, which the host alone waits for."""
    program = """
block = core.allocate(8 * MiB, stream=7)
ctypes.memset(block, 3, 8 * MiB)
work(9)
core.move(block, DRAM)
assert ctypes.string_at(block, 8 * MiB) == bytes([3]) * (8 * MiB)
"""
    holds(built, program)


def test_what_a_failed_unmap_leaves_of_a_move_is_cleared_by_the_next(built: Path) -> None:
    """No state moved any more, and 64 MiB of DRAM were lost to the job."""
    program = """
from torch_tiers.allocator.native import CoreError
block = core.allocate(8 * MiB, stream=7)
ctypes.memset(block, 3, 8 * MiB)
fake.fake_refuse_unmap(1)
try: core.move(block, DRAM)
except CoreError: pass
else: raise AssertionError
assert core.on(block, HBM) == 8 * MiB
core.move(block, DRAM)
assert core.on(block, DRAM) == 8 * MiB and ctypes.string_at(block, 8 * MiB) == bytes([3]) * (8 * MiB)
core.move(block, HBM)
assert core.counts().dram == 0
fake.fake_refuse_unmap(1)
try: core.move(block, DRAM)
except CoreError: pass
core.free(block); core.close()
"""
    holds(built, program)


def test_memory_of_a_graph_that_is_gone_is_kept_until_its_last_replay_is_over(built: Path) -> None:
    """That may be on any stream, not the one on which it was captured."""
    program = """
core.free(core.allocate(8 * MiB, stream=7, pool=1))
work(9)  # where the graph is replayed
core.retire(1)
core.trim()
assert core.counts().hbm == 0 and not fake.fake_pending(9)
"""
    holds(built, program)


def test_a_gpu_that_cannot_reach_the_memory_is_refused_and_harms_nobody(built: Path) -> None:
    program = """
from torch_tiers.allocator.native import CoreError
core.allocate(2 * MiB)
core.share(1)
try: core.share(2)
except CoreError as error: assert "cuMemSetAccess" in str(error)
else: raise AssertionError("it was not refused")
core.allocate(8 * MiB)
"""
    holds(built, program)


def test_a_free_is_pending_until_the_other_streams_have_passed_it(built: Path) -> None:
    program = """
block = core.allocate(8 * MiB, stream=7)
core.used_on(block, 8); core.used_on(block, 9)
work(9)
core.free(block)
assert core.allocate(8 * MiB, stream=7) != block and pending() == 1
library.wait(0, 9, library.record(0, 8)); library.record(0, 9).synchronize()
assert core.allocate(8 * MiB, stream=7) == block
"""
    holds(built, program)


def test_of_each_stream_one_event_is_asked_for_at_a_request_however_many_blocks_wait_for_it(built: Path) -> None:
    program = """
blocks = [core.allocate(MiB, stream=7) for _ in range(20)]
work(8); work(9)
for block in blocks:
    core.used_on(block, 8); core.used_on(block, 9)
    core.free(block)
before = fake.fake_queries()
core.allocate(MiB, stream=7)
assert pending() == 20 and fake.fake_queries() == before + 2
library.record(0, 8).synchronize(); library.record(0, 9).synchronize()
core.allocate(MiB, stream=7)
assert pending() == 0
"""
    holds(built, program)


def test_hbm_is_not_full_while_blocks_only_wait_for_other_streams(built: Path) -> None:
    """As PyTorch waits for them before it gives up; here the request went to DRAM, or found every tier full."""
    program = """
block = core.allocate(48 * MiB, stream=7)
core.used_on(block, 9); work(9)
core.free(block)
other = core.allocate(40 * MiB, stream=8)
assert core.on(other, HBM) == 40 * MiB and core.counts().dram == 0 and not fake.fake_pending(9)
core.used_on(other, 9); work(9); fake.fake_capture(9, True)
core.free(other)
assert core.on(core.allocate(40 * MiB, stream=8), DRAM) == 40 * MiB  # nobody may wait for what is being captured
fake.fake_capture(9, False)
"""
    holds(built, program)


def test_a_request_costs_the_same_however_many_blocks_wait_for_a_stream(built: Path) -> None:
    """10,000 that were used on another stream cost each request 0.7 ms."""
    program = """
import time
def held_up(count):
    blocks = [core.allocate(512, stream=7) for _ in range(count)]
    work(9)
    for block in blocks:
        core.used_on(block, 9); core.free(block)
    best = min(timed() for _ in range(5))
    library.record(0, 9).synchronize()
    core.allocate(512, stream=7)
    assert pending() == 0
    return best
def timed():
    begin = time.perf_counter()
    for _ in range(100): core.free(core.allocate(512, stream=7))
    return time.perf_counter() - begin
few, many = held_up(10), held_up(20000)
assert many < 20 * few, (few, many)
"""
    holds(built, program)


def test_a_free_of_what_a_captured_stream_uses_is_pending_until_the_capture_is_over(built: Path) -> None:
    program = """
block = core.allocate(8 * MiB, stream=7)
core.used_on(block, 8); core.used_on(block, 9)
fake.fake_capture(9, True)
core.free(block)
library.record(0, 8).synchronize()
core.allocate(MiB); assert pending() == 1
fake.fake_capture(9, False)
core.allocate(MiB)
library.record(0, 9).synchronize()
core.allocate(MiB); assert pending() == 0
"""
    holds(built, program)


@pytest.mark.parametrize("refused", [1, 2, 3, 4])
def test_a_free_without_an_event_is_pending_until_one_can_be_recorded(built: Path, refused: int) -> None:
    program = f"""
block = core.allocate(8 * MiB, stream=7)
core.used_on(block, 8); core.used_on(block, 9)
fake.fake_refuse({refused})
core.free(block)
assert pending() == 1
fake.fake_refuse(0)
core.allocate(MiB)
for stream in (8, 9): library.record(0, stream).synchronize()
core.allocate(MiB); assert pending() == 0
"""
    holds(built, program)


def test_an_event_that_cannot_be_asked_for_is_asked_for_again_and_not_destroyed(built: Path) -> None:
    """As after a kernel that failed: the driver answers every call with its error."""
    program = """
block = core.allocate(8 * MiB, stream=7)
core.used_on(block, 9)
core.free(block)
fake.fake_break(700)
core.allocate(MiB); core.allocate(MiB)
assert pending() == 1
"""
    holds(built, program)


def test_while_a_stream_is_captured_nothing_moves_and_the_layout_stays(built: Path) -> None:
    program = """
import numpy as np
from torch_tiers.allocator.native.sequence_layout import SequenceLayout
def lay_out(): core.set_layout(SequenceLayout(7, np.array([4 * MiB]), np.array([0], np.uint64), np.array([1, 1])))
lay_out()
block = core.allocate(4 * MiB, stream=7)
fake.fake_capture(7, True)
for refused in (lay_out, lambda: core.move(block, DRAM)):
    try: refused()
    except CoreBusy as busy: assert str(busy) == "a stream is being captured into a graph"
    else: raise AssertionError("it was not refused")
core.trim()
core.mark()
core.free(block)
assert core.allocate(4 * MiB, stream=7) == block and core.counts().planned == 2
fake.fake_capture(7, False)
"""
    holds(built, program)


def test_idle_memory_is_taken_from_where_it_lies_when_the_device_gives_less_than_the_limit(built: Path) -> None:
    """Other processes use it, too."""
    program = """
fake.fake_has_pages(16)
core.free(core.allocate(24 * MiB, stream=1))
block = core.allocate(32 * MiB, stream=2)
assert core.on(block, HBM) == 32 * MiB
"""
    holds(built, program)


def test_what_the_device_refuses_of_a_layout_lies_in_dram(built: Path) -> None:
    """And nobody claims more and more dram, to be told again that hbm is full."""
    program = """
import numpy as np
from torch_tiers.allocator.native.sequence_layout import SequenceLayout
fake.fake_has_pages(4)
core.set_layout(SequenceLayout(7, np.array([16 * MiB]), np.array([0], np.uint64), np.arange(8)))
block = core.allocate(16 * MiB, stream=7)
assert (core.on(block, HBM), core.on(block, DRAM)) == (8 * MiB, 8 * MiB) and core.counts().planned == 1
"""
    holds(built, program)


# Of a stream that the core has not heard of, in the mode in which whatever another thread asks for may spoil it.
CAPTURE = """
import threading
ready, over = threading.Event(), threading.Event()
def capture():
    core.capture(True); fake.fake_capture(9, True); ready.set()
    over.wait()
    fake.fake_capture(9, False); core.capture(False)
thread = threading.Thread(target=capture, daemon=True)
def begin(): thread.start(); ready.wait()
def end(): over.set(); thread.join()
"""


def test_a_graph_that_another_thread_captures_is_not_spoilt_by_what_the_core_does(built: Path) -> None:
    program = """
block = core.allocate(8 * MiB, stream=7); core.used_on(block, 8)
idle = core.allocate(56 * MiB, stream=7)
begin()
core.free(block)
core.free(idle); work(7)
other = core.allocate(48 * MiB, stream=6)
assert core.on(other, HBM) == 48 * MiB  # of what lay idle
library.record(0, 8).synchronize()
core.free(other); core.trim()
assert core.counts().hbm == pending() == 0
end()
"""
    holds(built, CAPTURE + program)


def test_nobody_waits_for_all_streams_while_a_graph_may_be_captured_somewhere(built: Path) -> None:
    """The driver allows that in no mode."""
    program = """
block = core.allocate(8 * MiB, stream=7)
core.free(core.allocate(8 * MiB, stream=7, pool=1)); core.retire(1)
begin()
try: core.move(block, DRAM)
except CoreBusy: pass
else: raise AssertionError("it was not refused")
core.trim(); assert core.counts().hbm == 16 * MiB
end()
core.move(block, DRAM)
core.trim(); assert core.counts().hbm == 0
"""
    holds(built, CAPTURE + program)


def test_a_thread_without_a_context_frees_and_allocates_like_any_other(built: Path) -> None:
    program = """
from concurrent.futures import ThreadPoolExecutor
def use():
    block = core.allocate(8 * MiB, stream=7); core.used_on(block, 9); work(9); core.free(block)
    library.record(0, 9).synchronize()
def settle(): core.allocate(MiB); core.trim(); return pending(), fake.fake_contexts()
for step in (use, settle):
    with ThreadPoolExecutor(1) as fresh: assert fresh.submit(step).result() in (None, (0, 0))
"""
    holds(built, program)


def test_whose_an_address_is_can_be_told_while_the_core_waits_for_a_stream(built: Path) -> None:
    """Whoever frees a block asks the cores of all GPUs, and the stream may wait for what that thread does next."""
    program = """
import threading
core.free(core.allocate(8 * MiB, stream=7)); block = core.allocate(8 * MiB, stream=8)
owns = core._library.tn_owns
owns.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
def told(): return [owns(core._core, address) for address in (block, block + 8 * MiB - 1, 0)] == [1, 1, 0]
fake.fake_stall(True)
waits = threading.Thread(target=core.trim); waits.start()
while not fake.fake_waiting(): pass
answers = []
asks = threading.Thread(target=lambda: answers.append(told()), daemon=True); asks.start(); asks.join(10)
fake.fake_stall(False); waits.join()
assert answers == [True]
"""
    holds(built, program)


def test_addresses_of_a_pool_that_is_gone_are_nobodys(built: Path) -> None:
    program = """
owns = core._library.tn_owns
owns.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
block = core.allocate(8 * MiB, pool=1)
core.free(block); core.retire(1)
assert owns(core._core, block)
core.trim()
assert not owns(core._core, block)
"""
    holds(built, program)


STORM = """
import random
import numpy as np
from torch_tiers.allocator.native import CoreFull
from torch_tiers.allocator.native.sequence_layout import SequenceLayout

SEED = int(sys.argv[2])
dice = random.Random(SEED)
fake.fake_seed(SEED + 1); fake.fake_kernels(False)
SPAN = 4096  # bytes that are written to the ends of a block, and read there before it is freed
streams, private, used, reads, pools = (1, 2, 3), 100, {}, [], {0: 0}

def at(buffer): return ctypes.addressof(buffer)

library.record(0, 1)  # from here on this thread has a context

def copy(target, source, stream):
    fake.cuMemcpyAsync(*map(ctypes.c_uint64, (target, source)), ctypes.c_size_t(SPAN), ctypes.c_void_p(stream))

def take():
    stream, pool = dice.choice(streams), dice.choice((0, 0, 0, private))
    nbytes = dice.choice((SPAN, 300_000, MiB, 2 * MiB, 3 * MiB, 7 * MiB))
    block = core.allocate(nbytes, stream, pool)
    pattern = ctypes.create_string_buffer(bytes([dice.randrange(1, 256)]) * SPAN, SPAN)
    places = (block, block + nbytes - SPAN)
    for place in places: copy(place, at(pattern), stream)
    used[block] = (stream, places, pattern, pool)
    pools[pool] = pools.get(pool, 0) + 1

def drop():
    if not used: return
    block = dice.choice(list(used))
    stream, places, pattern, pool = used.pop(block)
    reader = stream
    if dice.random() < 0.4:
        reader = dice.choice(streams)
        core.used_on(block, reader)
    for place in places:
        found = ctypes.create_string_buffer(SPAN)
        library.wait(0, reader, library.record(0, stream))
        copy(at(found), place, reader)
        reads.append((found, pattern))
    core.free(block)
    pools[pool] -= 1

def retire():
    global private
    core.retire(private)
    private += 1

def move():
    blocks = [block for block, (*_, pool) in used.items() if not pool]
    if blocks: core.move(dice.choice(blocks), dice.choice((HBM, DRAM)))

def lay_out():
    sizes = [dice.choice((MiB, 2 * MiB, 3 * MiB)) for _ in range(3)]
    offsets, costs = np.cumsum([0, *sizes[:-1]]).astype(np.uint64), np.arange(-(-sum(sizes) // (2 * MiB)))
    vary = np.array([dice.random() < 0.3 for _ in sizes])
    core.set_layout(SequenceLayout(dice.choice(streams), np.array(sizes), offsets, costs, vary))

capturing = False
def capture():
    global capturing
    capturing = not capturing
    if capturing: core.capture(True); fake.fake_capture(9, True)
    else: fake.fake_capture(9, False); core.capture(False)

def limit(): core.limit(HBM, dice.choice((24, 48, 64)) * MiB); fake.fake_has_pages(dice.choice((0, 4, 1000)))

steps = [take] * 40 + [drop] * 36 + [core.trim, retire, move, lay_out, core.mark, capture, limit, lambda: core.share(1)]
for _ in range(1500):
    try: dice.choice(steps)()
    except (CoreFull, CoreBusy): pass
    for _ in range(dice.randrange(4)): fake.fake_go_on()
if capturing: capture()
fake.fake_has_pages(1000)
while used: drop()
for stream in streams: library.record(0, stream).synchronize()
assert all(found.raw == pattern.raw for found, pattern in reads) and len(reads) > 500
core.allocate(1); retire(); core.trim()
counts = core.counts()
assert pending() == 0 and counts.allocated == 512 and counts.hbm + counts.dram == 2 * MiB, counts
assert not fake.fake_spoilt()
"""


def test_whatever_is_asked_in_whatever_order_streams_go_on_every_byte_stays_where_it_is(built: Path, seed: int) -> None:
    for one in range(seed, seed + 3):
        asked(built, START + STORM, str(one))
