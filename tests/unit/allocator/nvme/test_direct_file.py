"""A store on files that go through cuFile, over a double of that which misbehaves; host memory plays HBM."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.unit.fake_kvikio import Double, FakeKvikio, build, overseen
from torch_tiers.allocator.errors import CorruptionError, StoreError, TiersError
from torch_tiers.allocator.nvme.cufile import deregister, register
from torch_tiers.allocator.nvme.kvikio import KvikioFile, Mode
from torch_tiers.allocator.nvme.posix import PosixFile
from torch_tiers.allocator.nvme.ring import Ring
from torch_tiers.allocator.nvme.store import NvmeStore
from torch_tiers.allocator.sizes import KiB, MiB

STRIPE, SLOT = 64 * KiB, 256 * KiB
CPU = torch.device("cpu")
ROUNDS = 4


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Double:
    return build(tmp_path_factory.mktemp("double"))


@pytest.fixture
def fake(library: Double, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKvikio]:
    with overseen(library, monkeypatch) as made:
        yield made


@pytest.fixture
def double(fake: FakeKvikio) -> Double:
    return fake.double


@pytest.fixture
def ring(fake: FakeKvikio) -> Iterator[Ring]:
    made = Ring(CPU, 4, SLOT, register, deregister)
    yield made
    made.close()


@pytest.fixture
def files() -> list[KvikioFile]:
    return []


@pytest.fixture
def open_store(ring: Ring, files: list[KvikioFile], tmp_path: Path) -> Iterator[Callable[..., NvmeStore]]:
    made: list[NvmeStore] = []

    def open_file(mode: Mode, directory: Path) -> KvikioFile:
        files.append(KvikioFile(directory, mode=mode, direct=ring.holds))
        return files[-1]

    def make(mode: Mode = "gds", depth: int = 4) -> NvmeStore:
        backend = partial(open_file, mode)
        made.append(NvmeStore([tmp_path], 64 * MiB, gds="off", stripe=STRIPE, depth=depth, step=MiB, backend=backend))
        return made[-1]

    yield make
    for store in made:
        store.close()


OpenStore = Callable[..., NvmeStore]


def use(store: NvmeStore, ring: Ring, rounds: int = ROUNDS) -> list[str]:
    """Write and read through slots; what became of each round."""
    happened = []
    for number in range(rounds):
        extent = store.allocate(SLOT)
        assert extent is not None
        out, back = ring.take(), ring.take()
        sent = torch.randint(256, (SLOT,), generator=torch.manual_seed(number)).to(torch.uint8)
        try:
            store.write(extent, out.copy_(sent)).result()
            out.zero_()
            store.read(extent, back.zero_()).result()
            happened.append("right" if torch.equal(back, sent) else "WRONG")
        except StoreError as error:
            happened.append(type(error).__name__)
        ring.give(out)
        ring.give(back)
        store.free(extent)
    return happened


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_slots_go_through_cufile_and_nothing_is_said(
    open_store: OpenStore, ring: Ring, double: Double, caplog: pytest.LogCaptureFixture
) -> None:
    assert use(open_store(), ring) == ["right"] * ROUNDS
    assert double.calls("write") == double.calls("read") == ROUNDS * SLOT // STRIPE
    assert double.calls("buffer") == 1  # all slots at once
    assert not caplog.records


def test_host_memory_goes_to_the_same_file_by_system_calls(open_store: OpenStore, ring: Ring, double: Double) -> None:
    store, host = open_store(), Ring(CPU, 1, SLOT)
    extent, block, slot = store.allocate(SLOT), host.take(), ring.take()
    assert extent is not None
    store.write(extent, slot.fill_(7)).result()
    before = double.calls("read")
    store.read(extent, block.zero_()).result()
    assert double.calls("read") == before
    assert torch.equal(block, slot)
    ring.give(slot)


@pytest.mark.parametrize("raises", [True, False], ids=["raised", "returned"])
@pytest.mark.parametrize("calls", ["read", "write"])
@pytest.mark.parametrize("fault", ["failed", "refused", "torn", "none", "odd", "more"])
@pytest.mark.parametrize("every", [1, 3])
def test_what_cufile_fails_at_goes_through_host_memory_and_comes_right(
    fake: FakeKvikio,
    open_store: OpenStore,
    ring: Ring,
    files: list[KvikioFile],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    calls: str,
    fault: str,
    every: int,
    raises: bool,
) -> None:
    fake.raises = raises
    store = open_store(depth=1)
    fake.double.inject(calls, fault, every=every)
    assert use(store, ring) == ["right"] * ROUNDS
    (line,) = warnings(caplog)
    assert line.startswith(f"GPUDirect Storage at {tmp_path} failed (")
    assert line.endswith("): what is left goes through host memory")
    assert files[0].goes_direct == (every == 3)


@pytest.mark.parametrize("calls", ["read", "write"])
def test_after_three_failures_in_a_row_cufile_is_not_called_any_more(
    open_store: OpenStore, ring: Ring, double: Double, files: list[KvikioFile], calls: str
) -> None:
    store = open_store(depth=1)
    double.inject(calls, "failed")
    assert use(store, ring, rounds=1) == ["right"]
    assert files[0].failures == 3
    double.inject(calls, "")
    before = double.calls("read") + double.calls("write")
    assert use(store, ring) == ["right"] * ROUNDS
    assert double.calls("read") + double.calls("write") == before
    assert not files[0].goes_direct


def test_failures_with_a_success_between_do_not_add_up(
    open_store: OpenStore, ring: Ring, double: Double, files: list[KvikioFile]
) -> None:
    store = open_store(depth=1)
    double.inject("write", "failed", every=2)
    assert use(store, ring) == ["right"] * ROUNDS
    assert files[0].failures > 3 and files[0].goes_direct


@pytest.mark.parametrize("calls", ["read", "write"])
def test_short_transfers_go_on_through_cufile(
    open_store: OpenStore, ring: Ring, double: Double, caplog: pytest.LogCaptureFixture, calls: str
) -> None:
    store = open_store()
    double.inject(calls, "short", every=3)
    assert use(store, ring) == ["right"] * ROUNDS
    assert double.calls(calls) > ROUNDS * SLOT // STRIPE
    assert not caplog.records


@pytest.mark.parametrize("calls", ["read", "write"])
def test_requests_may_end_in_any_order(open_store: OpenStore, ring: Ring, double: Double, calls: str) -> None:
    store = open_store()
    double.inject(calls, "late", every=2)
    assert use(store, ring) == ["right"] * ROUNDS


@pytest.mark.parametrize(
    ("calls", "fault"),
    [("read", "flipped"), ("read", "lost"), ("read", "shifted"), ("write", "flipped"), ("write", "lost")],
)
def test_silent_corruption_is_an_error(
    open_store: OpenStore, ring: Ring, double: Double, calls: str, fault: str
) -> None:
    store = open_store()
    double.inject(calls, fault)
    assert use(store, ring) == [CorruptionError.__name__] * ROUNDS


def test_a_read_that_is_spoilt_once_is_read_again(open_store: OpenStore, ring: Ring, double: Double) -> None:
    store = open_store(depth=1)
    double.inject("read", "flipped", after=5, every=1000)
    assert use(store, ring) == ["right"] * ROUNDS


def test_a_drive_that_fails_both_ways_is_an_error(
    open_store: OpenStore, ring: Ring, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: PosixFile, block: torch.Tensor, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = open_store()
    double.inject("read", "failed")
    monkeypatch.setattr(PosixFile, "pread", fail)
    assert use(store, ring, rounds=2) == ["StoreError"] * 2


def test_a_directory_that_cufile_refuses_is_an_error_where_that_is_required(
    open_store: OpenStore, double: Double
) -> None:
    double.inject("handle", "refused")
    with pytest.raises(StoreError, match=r"open a file for cuFile in .* 5008"):
        open_store("gds")


def test_a_directory_that_cufile_refuses_is_served_through_host_memory(
    open_store: OpenStore, ring: Ring, double: Double, files: list[KvikioFile], caplog: pytest.LogCaptureFixture
) -> None:
    double.inject("handle", "refused")
    first = open_store("auto")
    assert use(first, ring) == ["right"] * ROUNDS
    assert use(open_store("auto"), ring) == ["right"] * ROUNDS
    assert double.calls("read") == 0 and not files[0].goes_direct
    assert ["5008" in line for line in warnings(caplog)] == [True]


def test_where_kvikio_would_not_use_cufile_a_file_that_may_do_without_does_not_either(
    fake: FakeKvikio, open_store: OpenStore, ring: Ring, caplog: pytest.LogCaptureFixture
) -> None:
    fake.available = False
    fake.mode = "AUTO"
    store = open_store("auto")
    fake.available = True
    assert use(store, ring) == ["right"] * ROUNDS
    assert fake.double.calls("handle") == 0
    assert not warnings(caplog)


def test_kvikios_own_bounce_buffers_serve_if_asked_for(open_store: OpenStore, ring: Ring, double: Double) -> None:
    assert use(open_store("compat"), ring) == ["right"] * ROUNDS
    assert double.calls("handle") == double.calls("write") == 0


@pytest.mark.parametrize("fault", ["", "failed", "late", "torn", "short"])
def test_many_threads_share_a_store_and_a_ring(open_store: OpenStore, ring: Ring, double: Double, fault: str) -> None:
    store = open_store()
    double.inject("read", fault, every=5)
    wrong: list[int] = []

    def work(worker: int) -> None:
        for turn in range(8):
            extent, slot = store.allocate(SLOT), ring.take()
            assert extent is not None
            value = (worker * 8 + turn) % 251
            store.write(extent, slot.fill_(value)).result()
            store.read(extent, slot.zero_()).result()
            wrong.extend([worker] * (not bool((slot == value).all())))
            ring.give(slot)
            store.free(extent)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert not wrong


@pytest.mark.filterwarnings("default:.* is multi-threaded, use of fork")
def test_a_forked_child_makes_no_call_and_its_parent_goes_on(
    open_store: OpenStore, ring: Ring, double: Double, files: list[KvikioFile], tmp_path: Path
) -> None:
    store = open_store()
    assert use(store, ring, rounds=1) == ["right"]
    slot = ring.take()
    told, tell = os.pipe()
    if (child := os.fork()) == 0:
        os.write(tell, b"right" if _child_is_refused(files, ring, slot, tmp_path) else b"wrong")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(told, 5) == b"right"
    os.close(told), os.close(tell)
    ring.give(slot)
    assert use(store, ring) == ["right"] * ROUNDS
    assert files[0].goes_direct


def _child_is_refused(files: list[KvikioFile], ring: Ring, slot: torch.Tensor, directory: Path) -> bool:
    refused = 0
    calls: tuple[Callable[[], object], ...] = (
        lambda: files[0].pread(slot, 0),
        lambda: files[0].pwrite(slot, 0),
        lambda: register(slot),
        lambda: ring.take(),
        lambda: KvikioFile(directory, mode="gds"),
    )
    for call in calls:
        try:
            call()
        except TiersError as error:
            refused += "forked" in str(error)
    deregister(slot)
    files.pop().close()
    ring.close()
    gc.collect()
    return refused == len(calls)


def test_memory_is_registered_once_and_deregistered_once(fake: FakeKvikio) -> None:
    block = Ring(CPU, 1, SLOT).take()
    register(block)
    for again in (block, block[:4096], block[4096:]):
        with pytest.raises(ValueError, match="registered already"):
            register(again)
    with pytest.raises(ValueError, match="not registered"):
        deregister(block[4096:])
    deregister(block)
    with pytest.raises(ValueError, match="not registered"):
        deregister(block)
    register(block)
    deregister(block)


def test_a_ring_that_cannot_be_registered_is_none(double: Double) -> None:
    double.inject("buffer", "refused")
    with pytest.raises(TiersError, match=r"256.0 KiB cannot be registered: cuFile error 5008"):
        Ring(CPU, 1, SLOT, register, deregister)


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, SLOT])
def test_slots_lie_apart_on_the_grid(nbytes: int) -> None:
    ring = Ring(CPU, 3, nbytes)
    slots = [ring.take() for _ in range(3)]
    assert all(slot.data_ptr() % 4096 == slot.numel() % 4096 == 0 for slot in slots)
    assert all(nbytes <= slot.numel() == ring.slot_bytes for slot in slots)
    for value, slot in enumerate(slots):
        slot.fill_(value)
    assert [slot.unique().tolist() for slot in slots] == [[0], [1], [2]]
    assert all(ring.holds(slot) for slot in slots)
    assert ring.nbytes_total == 3 * ring.slot_bytes
    ring.close()


def test_who_takes_a_slot_waits_until_there_is_one() -> None:
    ring = Ring(CPU, 1, SLOT)
    slot = ring.take()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ring.take)
        assert not waiting.done()
        ring.give(slot)
        assert waiting.result(30).data_ptr() == slot.data_ptr()


def test_a_slot_comes_back_once_and_to_its_own_ring() -> None:
    ring, other = Ring(CPU, 1, SLOT), Ring(CPU, 1, SLOT)
    slot = ring.take()
    with pytest.raises(ValueError, match="no slot"):
        other.give(slot)
    ring.give(slot)
    with pytest.raises(ValueError, match="no slot"):
        ring.give(slot)


def test_a_ring_that_closes_tells_who_waits_and_frees_its_memory_when_the_last_slot_is_back() -> None:
    told: list[str] = []
    ring = Ring(CPU, 1, SLOT, lambda block: told.append("registered"), lambda block: told.append("deregistered"))
    slot = ring.take()
    begun = threading.Event()

    def take() -> None:
        begun.set()
        with pytest.raises(TiersError, match="closed"):
            ring.take()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(take)
        begun.wait()
        ring.close()
        waiting.result(30)
    assert told == ["registered"]  # a drive may still be at work on it
    ring.give(slot)
    ring.close()
    assert told == ["registered", "deregistered"]


def test_memory_that_cannot_be_deregistered_is_not_freed(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(block: torch.Tensor) -> None:
        raise RuntimeError("the driver is gone")

    ring = Ring(CPU, 1, SLOT, lambda block: None, refuse)
    ring.close()
    assert "256.0 KiB of staging slots are not freed: the driver is gone" in caplog.text
