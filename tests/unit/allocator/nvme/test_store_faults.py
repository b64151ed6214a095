from __future__ import annotations

import errno
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.store_faults import Fault, FaultyFile, fail, flip, short
from torch_tiers.allocator.errors import CorruptionError, StoreError
from torch_tiers.allocator.host.dram import DramArena
from torch_tiers.allocator.nvme.extent import NvmeExtent
from torch_tiers.allocator.nvme.posix import PosixFile
from torch_tiers.allocator.nvme.store import NvmeStore
from torch_tiers.allocator.sizes import KiB, MiB

STRIPE = 64 * KiB
LOST = (
    "; what lay there is lost: look at dmesg, take that directory out of nvme.paths (TIERS_NVME_PATH) and go on from "
    "the last checkpoint"
)
Make = Callable[..., NvmeStore]


@pytest.fixture
def blocks() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Eight stripes of noise, and room for what comes back."""
    arena = DramArena(4 * MiB, pinned=False, step=4 * MiB)
    one, other = arena.allocate(8 * STRIPE), arena.allocate(8 * STRIPE)
    assert one and other
    one.tensor.random_(generator=torch.manual_seed(0))
    yield one.tensor, other.tensor
    arena.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Make a store whose first directory is faulty; depth 1, so that requests are counted in order."""
    made: list[NvmeStore] = []

    def make_store(directories: int = 1, checksum: bool = True, depth: int = 1, **faults: object) -> NvmeStore:
        paths = [tmp_path / f"drive{index}" for index in range(directories)]
        for path in paths:
            path.mkdir()

        def open_file(path: Path) -> FaultyFile:
            return FaultyFile(PosixFile(path), **faults if path == paths[0] else {})  # type: ignore[arg-type]

        sizes = {"capacity": 16 * MiB, "stripe": STRIPE, "step": MiB, "depth": depth}
        made.append(NvmeStore(paths, gds="off", checksum=checksum, backend=open_file, **sizes))
        return made[-1]

    yield make_store
    for store in made:
        store.close()


def take(store: NvmeStore, nbytes: int = 8 * STRIPE) -> NvmeExtent:
    extent = store.allocate(nbytes)
    assert extent is not None
    return extent


Blocks = tuple[torch.Tensor, torch.Tensor]


def test_a_failed_write_names_path_offset_and_size(make: Make, blocks: Blocks, tmp_path: Path) -> None:
    store = make(writes={3: fail(errno.EIO)}, twice=True)
    with pytest.raises(StoreError) as caught:
        store.write(take(store), blocks[0]).result()
    error = caught.value
    assert (error.path, error.offset, error.nbytes) == (str(tmp_path / "drive0"), 3 * STRIPE, STRIPE)
    assert error.action == "write"
    assert "Input/output error" in str(error)


@pytest.mark.parametrize("code", [errno.EIO, errno.EAGAIN])
def test_what_fails_once_is_tried_again_and_not_spoken_of(
    make: Make, blocks: Blocks, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    store = make(writes={n: fail(code) for n in range(0, 16, 2)}, reads={n: fail(code) for n in range(0, 16, 2)})
    extent = take(store)
    store.write(extent, blocks[0]).result()
    store.read(extent, blocks[1]).result()
    assert torch.equal(*blocks)
    assert not caplog.records


def test_a_drive_that_always_puts_off_is_an_error(make: Make, blocks: Blocks) -> None:
    store = make(writes={n: fail(errno.EAGAIN) for n in range(100)})
    with pytest.raises(StoreError, match="temporarily unavailable"):
        store.write(take(store), blocks[0]).result()


def test_writes_that_fail_now_and_then_leave_their_directory_in_use_said_once(
    make: Make, blocks: Blocks, caplog: pytest.LogCaptureFixture
) -> None:
    store = make(writes={n: fail(errno.EIO) for n in range(12) if n % 3 != 2}, twice=True)
    happened = []
    for _ in range(12):  # two that fail, each of them twice, and one that succeeds
        writing = store.write(take(store, STRIPE), blocks[0][:STRIPE])
        happened.append(writing.exception() is None)
    assert happened == [False, False, True] * 4
    assert ["stays in use unless 3 writes in a row fail" in record.message for record in caplog.records] == [True]


def test_a_moment_that_many_requests_meet_counts_once(
    make: Make, blocks: Blocks, caplog: pytest.LogCaptureFixture
) -> None:
    store = make(writes={n: fail(errno.EIO) for n in range(8)}, twice=True, depth=8)
    with pytest.raises(StoreError):
        store.write(take(store), blocks[0]).result()
    assert store.capacity == 16 * MiB
    assert "takes no more data" not in caplog.text


def test_what_is_right_when_it_is_read_again_is_handed_out_and_said_once(
    make: Make, blocks: Blocks, caplog: pytest.LogCaptureFixture
) -> None:
    store = make(reads={0: flip(77), 5: flip(77)})
    extent = take(store)
    store.write(extent, blocks[0]).result()
    store.read(extent, blocks[1]).result()
    assert torch.equal(*blocks)
    assert ["all was well when it was read again" in record.message for record in caplog.records] == [True]


def test_writes_that_fail_three_times_in_a_row_take_their_directory_out_of_rotation_said_once(
    make: Make, blocks: Blocks, caplog: pytest.LogCaptureFixture
) -> None:
    store = make(2, writes={n: fail(errno.EIO) for n in range(100)})
    bad = take(store)
    for _ in range(4):
        with pytest.raises(StoreError):
            store.write(bad, blocks[0]).result()
    good = take(store)
    store.write(good, blocks[0]).result()
    store.read(good, blocks[1]).result()
    assert torch.equal(*blocks)
    assert ["takes no more data" in record.message for record in caplog.records] == [False, True]
    assert "look at dmesg and name another directory" in caplog.text


def test_with_no_directory_left_the_capacity_is_reached(make: Make, blocks: Blocks) -> None:
    store = make(writes={0: fail(errno.ENOSPC)})
    extent = take(store)
    with pytest.raises(StoreError, match="No space left"):
        store.write(extent, blocks[0]).result()
    assert store.allocate(1) is None
    store.free(extent)
    assert (store.used, store.capacity) == (0, 0)


def test_what_lies_in_a_retired_directory_can_still_be_read(make: Make, blocks: Blocks) -> None:
    store = make(writes={8: fail(errno.ENOSPC)})
    old, new = take(store), take(store)
    store.write(old, blocks[0]).result()
    with pytest.raises(StoreError):
        store.write(new, blocks[0]).result()
    store.read(old, blocks[1]).result()
    assert torch.equal(*blocks)


def test_a_failed_read_is_an_exception_and_passes(make: Make, blocks: Blocks) -> None:
    store = make(reads={2: fail(errno.EIO)}, twice=True)
    extent = take(store)
    store.write(extent, blocks[0]).result()
    with pytest.raises(StoreError, match="cannot read 65536 bytes at offset 131072") as caught:
        store.read(extent, blocks[1]).result()
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(LOST)
    store.read(extent, blocks[1]).result()
    assert torch.equal(*blocks)


@pytest.mark.parametrize("fault", [short(16 * KiB), short(5000), fail(errno.EINTR)], ids=["short", "odd", "EINTR"])
def test_a_transfer_that_stops_half_way_goes_on(make: Make, blocks: Blocks, fault: Fault) -> None:
    store = make(reads={1: fault, 2: fault}, writes={0: fault, 4: fault})
    extent = take(store)
    store.write(extent, blocks[0]).result()
    store.read(extent, blocks[1]).result()
    assert torch.equal(*blocks)


def test_a_transfer_that_gets_nowhere_is_an_error(make: Make, blocks: Blocks) -> None:
    store = make(writes={0: short(0)})
    with pytest.raises(StoreError, match="only 0 bytes"):
        store.write(take(store), blocks[0]).result()


@pytest.mark.parametrize("bit", [0, 12345, 8 * STRIPE - 1])
def test_a_flipped_bit_is_found(make: Make, blocks: Blocks, bit: int, tmp_path: Path) -> None:
    store = make(reads={5: flip(bit)}, twice=True)
    extent = take(store)
    store.write(extent, blocks[0]).result()
    with pytest.raises(CorruptionError) as caught:
        store.read(extent, blocks[1]).result()
    assert (caught.value.path, caught.value.offset) == (str(tmp_path / "drive0"), 5 * STRIPE)
    assert str(caught.value).endswith(LOST)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_part_with_a_flipped_bit_is_never_said_to_have_arrived(make: Make, blocks: Blocks) -> None:
    store = make(reads={5: flip(77)}, twice=True)
    extent = take(store)
    store.write(extent, blocks[0]).result()
    arrived: list[int] = []
    with pytest.raises(CorruptionError):
        store.read(extent, blocks[1], lambda start, nbytes: arrived.append(start)).result()
    assert 5 * STRIPE not in arrived


def test_without_checksums_a_flipped_bit_passes(make: Make, blocks: Blocks) -> None:
    store = make(checksum=False, reads={5: flip(3)})
    extent = take(store)
    store.write(extent, blocks[0]).result()
    store.read(extent, blocks[1]).result()
    assert (blocks[0] != blocks[1]).sum() == 1


def test_a_full_disk_is_filled_to_the_brim_and_said_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    store = make(full_at=5 * MiB + 100 * KiB)
    taken = 0
    while store.allocate(4 * KiB):
        taken += 4 * KiB
    assert store.allocate(4 * KiB) is None
    assert taken == store.used == store.capacity == 5 * MiB + 100 * KiB
    assert ["No space left" in record.message for record in caplog.records] == [True]
    assert "name one more directory (TIERS_NVME_PATH)" in caplog.text


def test_where_one_disk_is_full_the_other_serves(make: Make) -> None:
    store = make(2, full_at=MiB)
    extents = [store.allocate(MiB) for _ in range(9)]
    assert all(extents)
    assert store.allocate(STRIPE) is None


LIMITED = """
import resource, sys
from pathlib import Path
from torch_tiers.allocator.host.dram import DramArena
from torch_tiers.allocator.errors import StoreError
from torch_tiers.allocator.nvme.store import NvmeStore

MiB = 1 << 20
store = NvmeStore([Path(sys.argv[1])], 64 * MiB, gds="off", step=8 * MiB)
block = DramArena(8 * MiB, pinned=False).allocate(8 * MiB).tensor
extent = store.allocate(8 * MiB)
resource.setrlimit(resource.RLIMIT_FSIZE, (6 * MiB, 6 * MiB))
if sys.argv[2] == "grow":
    print(store.allocate(8 * MiB), store.capacity)
else:
    try:
        store.write(extent, block).result()
    except StoreError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("when", "said"), [("grow", "None 8388608"), ("write", "cannot write 2097152 bytes at offset 6291456")]
)
def test_a_limit_of_the_kernel_is_met_with_an_answer(tmp_path: Path, when: str, said: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), when],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert said in process.stdout
    assert "File too large" in process.stdout + process.stderr


class Handler(logging.Handler):
    """What a program may have put in its log."""

    def __init__(self, handle: Callable[[], object]) -> None:
        super().__init__()
        self.emit = lambda record: self.seen.append(handle())  # type: ignore[method-assign]
        self.seen: list[object] = []


@pytest.fixture
def handled() -> Iterator[Callable[[Callable[[], object]], Handler]]:
    log, handlers = logging.getLogger("tiers"), list[Handler]()

    def handle(by: Callable[[], object]) -> Handler:
        handlers.append(Handler(by))
        log.addHandler(handlers[-1])
        return handlers[-1]

    yield handle
    for handler in handlers:
        log.removeHandler(handler)


def test_who_handles_the_log_may_ask_the_store(
    make: Make, blocks: Blocks, handled: Callable[[Callable[[], object]], Handler]
) -> None:
    """Also in a thread of its own, as handlers with queues do: it waited for ever."""
    store = make(writes={0: fail(errno.ENOSPC)}, twice=True, full_at=2 * MiB)

    def is_free() -> bool:
        free = store._lock.acquire(blocking=False)
        if free:
            store._lock.release()
        return free

    handler = handled(is_free)
    extent = take(store)
    while store.allocate(MiB) is not None:
        pass
    with pytest.raises(StoreError):
        store.write(extent, blocks[0]).result(timeout=10)
    assert handler.seen == [True, True]  # the drive is full, and takes no more


def test_a_handler_of_the_log_that_raises_leaves_nobody_waiting(
    make: Make, blocks: Blocks, handled: Callable[[Callable[[], object]], Handler]
) -> None:
    def fall_over() -> None:
        raise ValueError("a handler of the program's")

    store = make(writes={0: fail(errno.ENOSPC)}, twice=True)
    handled(fall_over)
    assert isinstance(store.write(take(store), blocks[0]).exception(timeout=10), StoreError)
