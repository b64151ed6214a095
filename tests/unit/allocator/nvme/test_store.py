from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.fake_kvikio import FakeKvikio, build
from torch_tiers.allocator.errors import StoreError, TiersError
from torch_tiers.allocator.extents import Extent
from torch_tiers.allocator.host.dram import DramArena
from torch_tiers.allocator.host.room import FRESH, Room
from torch_tiers.allocator.nvme import extent as nvme_extent
from torch_tiers.allocator.nvme import posix
from torch_tiers.allocator.nvme.backend import BLOCK, Backend, read_all, write_all
from torch_tiers.allocator.nvme.extent import NvmeExtent
from torch_tiers.allocator.nvme.files import FILES
from torch_tiers.allocator.nvme.kvikio import KvikioFile
from torch_tiers.allocator.nvme.posix import PosixFile
from torch_tiers.allocator.nvme.requests import RequestPool, Rest
from torch_tiers.allocator.nvme.store import NvmeStore
from torch_tiers.allocator.nvme.volume import Volume, allocate_in
from torch_tiers.allocator.sizes import KiB, MiB, round_up

STRIPE = 64 * KiB


@pytest.fixture
def memory() -> Iterator[Callable[[int], torch.Tensor]]:
    """Page-aligned memory of whole 4 KiB blocks."""
    arena = DramArena(512 * MiB, pinned=False, step=32 * MiB)

    def make(nbytes: int) -> torch.Tensor:
        block = arena.allocate(nbytes)
        assert block is not None
        return block.padded[: round_up(nbytes, BLOCK)]

    yield make
    arena.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., NvmeStore]]:
    """Make a store over some directories; it is closed at the end."""
    made: list[NvmeStore] = []

    def make_store(directories: int = 1, capacity: int = 64 * MiB, **options: object) -> NvmeStore:
        paths = [tmp_path / f"drive{index}" for index in range(directories)]
        for path in paths:
            path.mkdir(exist_ok=True)
        settings = {"gds": "off", "stripe": STRIPE, "depth": 4, "step": MiB, **options}
        made.append(NvmeStore(paths, capacity, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make_store
    for store in made:
        store.close()


Memory = Callable[[int], torch.Tensor]
Make = Callable[..., NvmeStore]


def take(store: NvmeStore, nbytes: int) -> NvmeExtent:
    extent = store.allocate(nbytes)
    assert extent is not None
    return extent


def fill(block: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return block.copy_(torch.randint(256, block.shape, generator=torch.manual_seed(seed)).to(torch.uint8))


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, STRIPE, STRIPE + 1, 10 * STRIPE + 12345])
@pytest.mark.parametrize("directories", [1, 3])
def test_what_was_written_comes_back(make: Make, memory: Memory, nbytes: int, directories: int) -> None:
    store = make(directories)
    extent, written, back = take(store, nbytes), fill(memory(nbytes)), memory(nbytes)
    store.write(extent, written).result()
    store.read(extent, back).result()
    assert torch.equal(written, back)


def test_an_extent_is_whole_blocks(make: Make) -> None:
    store = make()
    assert take(store, 4097).nbytes == store.used == 8192


def test_an_extent_is_split_evenly_over_all_directories(make: Make, tmp_path: Path, memory: Memory) -> None:
    written: dict[str, int] = {}

    class Counting(PosixFile):
        def pwrite(self, block: torch.Tensor, offset: int) -> int:
            count = super().pwrite(block, offset)
            written[self.path] = written.get(self.path, 0) + count
            return count

    store = make(3, backend=Counting)
    extent = take(store, 9 * STRIPE)
    store.write(extent, fill(memory(9 * STRIPE))).result()
    assert written == {str(tmp_path / f"drive{index}"): 3 * STRIPE for index in range(3)}


def test_a_slower_directory_is_given_less(make: Make, tmp_path: Path, memory: Memory) -> None:
    """Else the others would wait for it: as many bytes each are as slow as all of them on the slowest."""
    written: dict[str, int] = {}

    class Uneven(PosixFile):
        def pwrite(self, block: torch.Tensor, offset: int) -> int:
            time.sleep(0.016 if self.path.endswith("drive0") else 0.004)
            count = super().pwrite(block, offset)
            written[self.path] = written.get(self.path, 0) + count
            return count

    store = make(2, backend=Uneven)
    for _ in range(16):
        extent = take(store, 5 * STRIPE)
        store.write(extent, fill(memory(5 * STRIPE))).result()
        store.free(extent)
    slow, fast = (written[str(tmp_path / f"drive{index}")] for index in range(2))
    assert 2 < fast / slow < 6


@pytest.mark.parametrize("hangs", [False, True])
def test_directories_that_are_about_as_fast_have_as_much_each(tmp_path: Path, hangs: bool) -> None:
    """A request that hung once, or one that takes a fifth longer, is no slower drive."""
    volumes = [Volume(PosixFile(tmp_path), 64 * MiB, MiB) for _ in range(2)]
    for number in range(1000):
        volume, extent = volumes[number % 2], taken(volumes)
        volume.note_request(STRIPE, 30.0 if hangs and number == 500 else 0.001 * (1.2 if number % 2 else 1.0))
        extent[0].free(extent[1])
    for volume in volumes:
        volume.load = 0.0
    counts = [taken(volumes)[0] for _ in range(100)]
    assert 45 <= counts.count(volumes[0]) <= 55
    for volume in volumes:
        volume.close()


def taken(volumes: list[Volume]) -> tuple[Volume, Extent]:
    found = allocate_in(volumes, STRIPE)
    assert found is not None
    return found


def test_a_directory_that_was_full_is_not_given_all_that_it_missed(make: Make, tmp_path: Path) -> None:
    store = make(2, capacity=20 * STRIPE)
    held = [take(store, STRIPE) for _ in range(20)]
    first = held[0].stripes[0].volume
    for extent in held:
        if extent.stripes[0].volume is not first:
            store.free(extent)
    for _ in range(50):
        store.free(take(store, STRIPE))  # in the other one
    for extent in held:
        if extent.stripes[0].volume is first:
            store.free(extent)
    taken = [take(store, STRIPE).stripes[0].volume for _ in range(10)]
    assert taken.count(first) <= 6


def test_small_extents_take_turns(make: Make) -> None:
    store = make(2, capacity=2 * MiB)
    assert all(take(store, STRIPE) for _ in range(2 * MiB // STRIPE))


def test_the_capacity_is_never_exceeded(make: Make) -> None:
    store = make(2, capacity=20 * STRIPE)
    extents = [take(store, 3 * STRIPE) for _ in range(6)]
    assert store.allocate(3 * STRIPE) is None
    assert store.used == store.peak == 18 * STRIPE <= store.capacity == 20 * STRIPE
    store.free(extents[0])
    assert store.allocate(3 * STRIPE) is not None


def test_fragments_serve_a_large_request(make: Make) -> None:
    store = make(capacity=16 * STRIPE)
    extents = [take(store, STRIPE) for _ in range(16)]
    for extent in extents[::2]:
        store.free(extent)
    assert store.allocate(8 * STRIPE) is not None


def test_an_extent_cannot_be_freed_twice(make: Make) -> None:
    store = make()
    extent = take(store, STRIPE)
    store.free(extent)
    with pytest.raises(ValueError, match="freed twice"):
        store.free(extent)
    assert store.used == 0


def test_what_was_never_written_cannot_be_read(make: Make, memory: Memory) -> None:
    store = make(checksum=False)
    with pytest.raises(ValueError, match="not been written"):
        store.read(take(store, STRIPE), memory(STRIPE))


@pytest.mark.parametrize("spoil", [lambda b: b[:-BLOCK], lambda b: b.view(torch.int32), lambda b: b.view(2, -1)])
def test_a_block_that_does_not_fit_is_refused(
    make: Make, memory: Memory, spoil: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    store = make()
    with pytest.raises(ValueError):
        store.write(take(store, STRIPE), spoil(memory(STRIPE)))


def test_a_block_off_the_grid_is_refused(make: Make, memory: Memory) -> None:
    store = make()
    with pytest.raises(ValueError, match="multiple"):
        store.write(take(store, STRIPE), memory(STRIPE + BLOCK)[16 : 16 + STRIPE])


class Gated(PosixFile):
    """Writes wait for the gate; the order of what gets through is kept."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.gate = threading.Event()
        self.waiting = threading.Event()
        self.order: list[str] = []

    def pwrite(self, block: torch.Tensor, offset: int) -> int:
        self.waiting.set()
        self.gate.wait()
        self.order.append("write")
        return super().pwrite(block, offset)

    def pread(self, block: torch.Tensor, offset: int) -> int:
        self.order.append("read")
        return super().pread(block, offset)


def test_reads_overtake_queued_writes(make: Make, memory: Memory) -> None:
    files: list[Gated] = []

    def open_gated(directory: Path) -> Gated:
        files.append(Gated(directory))
        return files[-1]

    store = make(backend=open_gated, depth=1)
    gated = files[0]
    early, late = take(store, STRIPE), take(store, 4 * STRIPE)
    gated.gate.set()
    store.write(early, memory(STRIPE)).result()
    gated.gate.clear()
    gated.waiting.clear()
    gated.order.clear()
    writing = store.write(late, memory(4 * STRIPE))
    gated.waiting.wait()  # the first of its stripes is with the drive, three are queued
    reading = store.read(early, memory(STRIPE))
    gated.gate.set()
    reading.result()
    writing.result()
    assert gated.order == ["write", "read", "write", "write", "write"]


def test_sums_are_computed_while_the_drive_writes(make: Make, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[Gated] = []
    summed = threading.Semaphore(0)

    def open_gated(directory: Path) -> Gated:
        files.append(Gated(directory))
        return files[-1]

    def counted(part: torch.Tensor) -> int:
        summed.release()
        return 0

    monkeypatch.setattr(nvme_extent, "sum_for", lambda block: counted)
    store = make(backend=open_gated, depth=1)
    writing = store.write(take(store, 4 * STRIPE), memory(4 * STRIPE))
    assert all(summed.acquire(timeout=30) for _ in range(4))
    assert not writing.done()
    files[0].gate.set()
    writing.result()


def test_the_drive_reads_on_while_what_came_is_checked() -> None:
    read, checked = threading.Semaphore(0), threading.Event()
    pool = RequestPool(depth=1, helpers=1, name="test")

    def check() -> None:
        checked.wait(30)

    def fetch() -> Rest:
        read.release()
        return check

    pool.read(fetch)
    pool.read(fetch)
    assert all(read.acquire(timeout=30) for _ in range(2))  # by the helper, as the first thread checks
    checked.set()
    pool.close()


@pytest.mark.parametrize("helpers", [0, 3])
def test_no_more_requests_are_on_the_drives_than_its_depth(helpers: int) -> None:
    depth, lock, now, most, done = 2, threading.Lock(), 0, 0, threading.Semaphore(0)
    pool = RequestPool(depth, helpers, "test")

    def request() -> Rest:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.001)
        with lock:
            now -= 1
        return done.release

    for _ in range(50):
        pool.read(request)
        pool.write(request)
    pool.close()  # which runs all that is queued
    assert most <= depth
    assert all(done.acquire(blocking=False) for _ in range(100))


def test_an_extent_is_not_readable_before_its_write_is_over(make: Make, memory: Memory) -> None:
    files: list[Gated] = []

    def open_gated(directory: Path) -> Gated:
        files.append(Gated(directory))
        return files[-1]

    store = make(backend=open_gated)
    extent = take(store, STRIPE)
    writing = store.write(extent, memory(STRIPE))
    with pytest.raises(ValueError, match="not been written"):
        store.read(extent, memory(STRIPE))
    files[0].gate.set()
    writing.result()


@pytest.mark.parametrize("checksum", [True, False])
def test_each_part_that_came_back_is_told_once(make: Make, memory: Memory, checksum: bool) -> None:
    store = make(2, checksum=checksum)
    extent, written, back = (
        take(store, 5 * STRIPE + BLOCK),
        fill(memory(5 * STRIPE + BLOCK)),
        memory(5 * STRIPE + BLOCK),
    )
    store.write(extent, written).result()
    arrived: list[tuple[int, int]] = []
    intact: list[bool] = []

    def note(start: int, nbytes: int) -> None:
        arrived.append((start, nbytes))
        intact.append(torch.equal(back[start : start + nbytes], written[start : start + nbytes]))

    store.read(extent, back, note).result()
    assert sorted(arrived) == [*((k * STRIPE, STRIPE) for k in range(5)), (5 * STRIPE, BLOCK)]
    assert all(intact)


def test_many_threads_share_it(make: Make, memory: Memory, seed: int) -> None:
    store = make(3, capacity=16 * MiB)
    wrong: list[int] = []

    def work(worker: int) -> None:
        rng = random.Random(seed + worker)
        block, back = memory(MiB), memory(MiB)
        for turn in range(25):
            nbytes = BLOCK * rng.randrange(1, MiB // BLOCK)
            extent = take(store, nbytes)
            block.fill_((worker * 25 + turn) % 256)
            store.write(extent, block[:nbytes]).result()
            store.read(extent, back[:nbytes]).result()
            if not torch.equal(block[:nbytes], back[:nbytes]):
                wrong.append(worker)
            store.free(extent)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert store.used == 0
    assert store.peak <= store.capacity


def test_its_files_are_private_and_have_no_name(make: Make, tmp_path: Path, memory: Memory) -> None:
    modes = []

    class Watched(PosixFile):
        def __init__(self, directory: Path) -> None:
            super().__init__(directory)
            modes.append(stat.S_IMODE(os.fstat(self.fileno()).st_mode))

    store = make(2, backend=Watched)
    store.write(take(store, STRIPE), memory(STRIPE)).result()
    assert modes == [0o600, 0o600]
    assert [*tmp_path.glob("*/*"), *tmp_path.glob("*/.*")] == []


def test_filesystems_without_unnamed_files_keep_none_either(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, memory: Memory
) -> None:
    real_open = os.open

    def open_named(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real_open(path, flags, mode)

    monkeypatch.setattr(posix.os, "open", open_named)
    store = make()
    extent, block = take(store, STRIPE), fill(memory(STRIPE))
    store.write(extent, block).result()
    assert [*tmp_path.glob("*/*"), *tmp_path.glob("*/.*")] == []


def test_disk_space_is_claimed_in_steps(make: Make, memory: Memory) -> None:
    files: list[PosixFile] = []

    class Watched(PosixFile):
        def __init__(self, directory: Path) -> None:
            super().__init__(directory)
            files.append(self)

    store = make(capacity=1 << 50, backend=Watched)
    take(store, STRIPE)
    assert os.fstat(files[0].fileno()).st_size == MiB


def test_a_directory_in_memory_takes_no_more_than_the_system_leaves_and_says_so_once(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files: list[PosixFile] = []
    left = 64 * MiB

    class Watched(PosixFile):
        def __init__(self, directory: Path) -> None:
            super().__init__(directory)
            files.append(self)

    def room() -> Room:
        return Room(left - sum(os.fstat(file.fileno()).st_size for file in files[:1]), "the others are many")

    store = make(2, capacity=256 * MiB, step=8 * MiB, backend=Watched, rooms={tmp_path / "drive0": room})
    while os.fstat(files[1].fileno()).st_size < 128 * MiB:
        take(store, STRIPE)
    assert os.fstat(files[0].fileno()).st_size == 64 * MiB
    while store.allocate(STRIPE):
        pass
    assert store.used == store.capacity == 192 * MiB
    assert [record.getMessage() for record in caplog.records] == [
        f"nvme at {tmp_path / 'drive0'} stays at 64.0 MiB of 128.0 MiB for now: the others are many"
    ]
    left = 128 * MiB
    time.sleep(2 * FRESH)
    assert store.allocate(STRIPE)
    assert store.capacity == 256 * MiB


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("cached", [True, False])
def test_a_filesystem_without_fallocate_serves_as_well(
    make: Make, memory: Memory, monkeypatch: pytest.MonkeyPatch, code: int, cached: bool
) -> None:
    real, asked = os.posix_fallocate, []

    def refuse(fd: int, start: int, nbytes: int) -> None:
        asked.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        if len(asked) % 2 or not cached:
            raise OSError(code, os.strerror(code))
        real(fd, start, nbytes)

    monkeypatch.setattr(posix.os, "posix_fallocate", refuse)
    descriptors = len(os.listdir("/proc/self/fd"))
    store = make()
    extent, block, back = take(store, 3 * MiB), fill(memory(3 * MiB)), memory(3 * MiB)
    store.write(extent, block).result()
    store.read(extent, back).result()
    assert torch.equal(block, back)
    assert asked and not any(asked[1::2])  # the second try never past the page cache
    assert len(os.listdir("/proc/self/fd")) == descriptors + FILES


def test_a_disk_that_is_full_without_fallocate_is_full(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [errno.EOPNOTSUPP, errno.ENOSPC] * 20

    def refuse(fd: int, start: int, nbytes: int) -> None:
        code = answers.pop(0)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(posix.os, "posix_fallocate", refuse)
    assert make().allocate(STRIPE) is None
    assert ["No space left" in record.message for record in caplog.records] == [True]


def test_a_removed_directory_does_not_disturb_it(make: Make, tmp_path: Path, memory: Memory) -> None:
    store = make()
    before = take(store, STRIPE)
    block, back = fill(memory(STRIPE)), memory(STRIPE)
    store.write(before, block).result()
    (tmp_path / "drive0").rmdir()
    after = take(store, 4 * MiB)  # grows the file
    store.write(after, fill(memory(4 * MiB))).result()
    store.read(before, back).result()
    assert torch.equal(block, back)


def test_where_o_direct_is_refused_it_says_so_and_works(
    make: Make, memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = posix.fcntl.fcntl

    def refuse(fd: int, command: int, flags: int = 0) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(fd, command, flags)

    monkeypatch.setattr(posix.fcntl, "fcntl", refuse)
    store = make()
    extent, block, back = take(store, STRIPE), fill(memory(STRIPE)), memory(STRIPE)
    store.write(extent, block).result()
    store.read(extent, back).result()
    assert torch.equal(block, back)
    make().close()
    assert ["page cache" in record.message for record in caplog.records] == [True]
    assert "TIERS_NVME_PATH" in caplog.text


def test_closing_is_idempotent_and_ends_threads_and_descriptors(tmp_path: Path, memory: Memory) -> None:
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    store = NvmeStore([tmp_path], MiB, gds="off")
    store.write(take(store, STRIPE), memory(STRIPE)).result()
    store.close()
    store.close()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_a_closed_store_answers_every_request(make: Make, memory: Memory) -> None:
    store = make()
    extent = take(store, STRIPE)
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.write(extent, memory(STRIPE)).result(timeout=10)


def test_a_directory_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nowhere: No such file or directory; name another directory"):
        NvmeStore([tmp_path, tmp_path / "nowhere"], MiB, gds="off")


def test_gds_is_refused_where_it_is_required_and_cannot_be(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there may be GPUDirect Storage here")
    with pytest.raises(TiersError, match="no CUDA device"):
        NvmeStore([tmp_path], MiB, gds="require")


def test_gds_is_passed_over_where_it_is_preferred_and_cannot_be(make: Make, memory: Memory) -> None:
    store = make(gds="prefer")
    store.write(take(store, STRIPE), memory(STRIPE)).result()


KILLED = """
import sys, time
from pathlib import Path
from torch_tiers.allocator.host.dram import DramArena
from torch_tiers.allocator.nvme.store import NvmeStore
store = NvmeStore([Path(sys.argv[1])], 64 << 20, gds="off", step=1 << 20)
block = DramArena(4 << 20, pinned=False).allocate(4 << 20).tensor
print("ready", flush=True)
while True:
    extent = store.allocate(4 << 20)
    store.write(extent, block).result()
    store.free(extent)
"""


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def fake_kvikio(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Stand in for a library that opens the file again, by the name of the first descriptor."""
    FakeKvikio(build(tmp_path_factory.mktemp("double"))).install(monkeypatch)


def open_files() -> set[tuple[int, int]]:
    """What the descriptors of this process lead to."""
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    found = [os.stat(path) for path in paths if os.path.exists(path)]  # that of the listing is closed by now
    return {(status.st_dev, status.st_ino) for status in found}


def open_kvikio(directory: Path) -> KvikioFile:
    return KvikioFile(directory, mode="auto")


@pytest.mark.usefixtures("fake_kvikio")
@pytest.mark.parametrize("open_file", [PosixFile, open_kvikio])
@pytest.mark.filterwarnings("default:.* is multi-threaded, use of fork")
def test_a_forked_child_neither_keeps_the_disk_space_nor_reads_or_writes(
    tmp_path: Path, memory: Memory, open_file: Callable[[Path], Backend]
) -> None:
    """As a DataLoader's worker that outlives its trainer."""
    before = open_files()
    file, block = open_file(tmp_path), fill(memory(STRIPE))
    file.grow(STRIPE)
    its = open_files() - before
    assert len(its) == 1
    told, tell = os.pipe()
    if (child := os.fork()) == 0:
        refused = 0
        for move in (read_all, write_all):
            try:
                move(file, block, 0)
            except StoreError as error:
                refused += "forked" in str(error)
        kept = its & open_files()
        file.close()
        os.write(tell, b"right" if refused == 2 and not kept else b"wrong")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(told, 5) == b"right"
    os.close(told), os.close(tell)
    write_all(file, block, 0)
    file.close()


def test_a_program_that_ends_with_writes_under_way_ends_as_it_would(tmp_path: Path) -> None:
    """A thread that the interpreter stops within C++ takes the process down, so the store is closed before."""
    program = """
import sys
from pathlib import Path
from torch_tiers.allocator.host.dram import DramArena
from torch_tiers.allocator.nvme.store import NvmeStore

MiB = 1 << 20
store = NvmeStore([Path(sys.argv[1])], 256 * MiB, gds="off", step=64 * MiB)
arena = DramArena(256 * MiB, pinned=False)
for _ in range(12):
    store.write(store.allocate(16 * MiB), arena.allocate(16 * MiB).tensor)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
