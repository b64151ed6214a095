"""A tensor of state on NVMe is to a program as any other tensor, whatever it does with it."""

from __future__ import annotations

import copy
import io
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from torch_tiers.allocator.errors import TierFull, TiersError
from torch_tiers.allocator.host.dram import DramArena
from torch_tiers.allocator.nvme.posix import PosixFile
from torch_tiers.allocator.nvme.store import NvmeStore
from torch_tiers.allocator.sizes import PAGE, MiB
from torch_tiers.migrator.offload.backing import Backing
from torch_tiers.migrator.state import slices
from torch_tiers.migrator.state.nvme_state import NvmeState
from torch_tiers.migrator.state.nvme_tensor import NvmeTensor
from torch_tiers.migrator.streams.host import HostCompute, HostLane
from torch_tiers.migrator.telemetry.counters import Counters

SIZE = 5, 70  # in parts of 128 numbers: the last one is shorter


class Store:
    """State on NVMe, in parts of 128 numbers."""

    def __init__(self, path: Path, dram: int = 16 * MiB, capacity: int = 64 * MiB) -> None:
        counters = self.counters = Counters()
        counters.moved |= {"read": 0, "write": 0}
        self.arena = DramArena(dram, pinned=False, step=dram)
        self.nvme = NvmeStore([path], capacity, gds="off", step=16 * MiB)
        self.backing = Backing(self.arena, self.nvme, counters)
        lanes = HostLane("read", counters), HostLane("write", counters)
        self.state = NvmeState(HostCompute(counters), *lanes, self.backing, counters)

    def put(self, tensor: Tensor) -> NvmeTensor:
        return self.state.put(tensor)

    @property
    def used(self) -> int:
        """Bytes on NVMe, once nothing is on its way and what is not used was dropped."""
        self.state.drop_unused()
        self.backing.close()
        return self.nvme.used

    def close(self) -> None:
        self.state.close()
        self.backing.close()
        self.nvme.close()
        self.arena.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path)
    with mock.patch.object(slices, "NUMBERS", 128):
        yield made
    made.close()


def a_tensor() -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(0))


READS: dict[str, Callable[[Tensor], object]] = {
    "numbers": lambda t: t.tolist(),
    "sum": lambda t: t.sum(),
    "copy": lambda t: t.clone(),
    "to": lambda t: t.to(torch.float64),
    "with another": lambda t: torch.ones(SIZE) + t,
    "several": lambda t: torch.stack(torch._foreach_mul([t, t], 2.0)),
    "detached": lambda t: t.detach().data.double(),
    "deep copy": copy.deepcopy,
    "text": lambda t: str(t.sum().item()),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "shape": lambda t: (t.shape, t.dtype, t.device, t.stride(), t.nbytes, t.is_contiguous()),
    "equal": lambda t: torch.equal(t, a_tensor()),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_whoever_reads_gets_its_numbers_and_it_stays_there(read: Callable[[Tensor], object], store: Store) -> None:
    kept = store.put(a_tensor())
    expected, found = read(a_tensor()), read(kept)
    assert torch.equal(found, expected) if isinstance(found, Tensor) else found == expected
    assert not isinstance(found, NvmeTensor)
    assert kept.contents.restored is None


def _write_by_numpy(tensor: Tensor) -> None:
    torch.from_dlpack(tensor).numpy()[1] = 7


def _give_other_data(tensor: Tensor) -> None:
    tensor.data = torch.full(SIZE, 4.0)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda t: t.mul_(2),
    "copied": lambda t: t.copy_(torch.ones(SIZE)),
    "out": lambda t: torch.add(torch.ones(SIZE), 1, out=t),
    "several": lambda t: torch._foreach_add_([t], 1.0),
    "row": lambda t: t.__setitem__(2, 5.0),
    "view": lambda t: t.view(-1)[3:9].zero_(),
    "detached": lambda t: t.detach().mul_(3),
    "data": lambda t: t.data.zero_(),
    "view of the detached": lambda t: t.detach()[1:3].fill_(9),
    "numpy": _write_by_numpy,
    "other data": _give_other_data,
    "detached in place": lambda t: t.detach_().mul_(3),
    "copied by reference": lambda t: copy.copy(t).add_(1),
    "memory of another": lambda t: torch.empty(0).set_(t).add_(1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_whoever_writes_finds_what_was_written(write: Callable[[Tensor], object], store: Store) -> None:
    plain, kept = a_tensor(), store.put(a_tensor())
    alias = kept.detach()
    write(plain)
    write(kept)
    assert torch.equal(kept.clone(), plain)
    assert torch.equal(alias.clone(), plain), "it is the same tensor"
    assert store.used == 0, "it is in memory from then on"


@pytest.mark.parametrize(
    "change", [lambda t: t.unsqueeze_(0), lambda t: t.resize_(3), lambda t: setattr(t, "data", torch.ones(3))]
)
def test_it_keeps_its_shape(change: Callable[[Tensor], object], store: Store) -> None:
    kept = store.put(a_tensor())
    with pytest.raises(TiersError):
        change(kept)
    assert torch.equal(kept, a_tensor())


def test_what_is_restored_in_inference_mode_can_be_updated(store: Store) -> None:
    kept = store.put(a_tensor())
    with torch.inference_mode():
        kept.detach().view(-1)
    assert not kept.contents.restore().is_inference()


def test_who_reads_while_a_step_is_made_waits_and_who_writes_within_it_is_told(store: Store) -> None:
    kept, seen = store.put(a_tensor()), list[Tensor]()
    thread = threading.Thread(target=lambda: seen.append(kept.view(-1).clone()))
    with store.state.stepping():
        thread.start()
        thread.join(0.2)
        assert not seen
        assert torch.equal(kept.clone(), a_tensor()), "as a signal's handler that saves"
        with pytest.raises(TiersError, match="being updated"):
            kept.mul_(2)
    thread.join(10)
    assert torch.equal(seen[0], a_tensor().view(-1))


def test_it_is_no_page_group(store: Store) -> None:
    store.put(a_tensor())
    assert store.counters.groups == 0


def test_an_operator_in_place_returns_the_tensor_itself(store: Store) -> None:
    kept = store.put(a_tensor())
    assert kept.add_(1) is kept


def test_its_address_is_that_of_memory_which_stays(store: Store) -> None:
    kept = store.put(a_tensor())
    address = kept.data_ptr()
    kept.mul_(2)
    assert kept.data_ptr() == address != 0
    assert kept.untyped_storage().data_ptr() == address


def test_what_is_saved_is_a_plain_file_and_its_bytes_may_leave_memory_meanwhile(store: Store, tmp_path: Path) -> None:
    kept, file = store.put(a_tensor()), io.BytesIO()
    before = set(tmp_path.iterdir())
    torch.save({"moment": kept}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["moment"]
    assert type(loaded) is Tensor
    assert torch.equal(loaded, a_tensor())
    assert set(tmp_path.iterdir()) == before, "no file is left"


def test_its_bytes_go_when_it_does(store: Store) -> None:
    kept = store.put(a_tensor())
    alias = kept.detach()
    del kept
    assert torch.equal(alias, a_tensor())
    del alias
    assert store.used == 0


def test_a_process_that_was_forked_is_told_that_it_cannot_read(store: Store) -> None:
    kept = store.put(a_tensor())
    with mock.patch.object(os, "getpid", lambda: -1), pytest.raises(TiersError, match="spawn"):
        kept.clone()


def test_after_the_session_it_cannot_be_read(store: Store) -> None:
    kept = store.put(a_tensor())
    store.backing.close()
    with pytest.raises(TiersError, match="session is over"):
        kept.clone()
    assert "size=(5, 70)" in repr(kept)


def test_threads_put_read_and_restore_side_by_side(store: Store) -> None:
    failed = list[object]()
    until = time.monotonic() + 3

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            while time.monotonic() < until:
                plain = torch.randn(SIZE, generator=generator)
                kept = store.put(plain)
                if not torch.equal(kept.clone(), plain) or not torch.equal(kept.view(-1), plain.view(-1)):
                    failed.append("other numbers")
        except BaseException as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failed
    assert store.used == 0


def test_no_more_dram_is_taken_than_is_left_for_what_is_on_its_way(store: Store) -> None:
    """To a store that is slow, and from it where a checkpoint reads all of them."""
    plain_write = PosixFile.pwrite

    def slowly(*how: object) -> object:
        time.sleep(0.01)
        return plain_write(*how)  # type: ignore[arg-type]

    with mock.patch.object(slices, "IN_TRANSIT", 4 * PAGE), mock.patch.object(PosixFile, "pwrite", slowly):
        kept = [store.put(a_tensor()) for _ in range(12)]
    assert store.arena.peak <= 4 * PAGE
    for tensor in kept:
        assert torch.equal(tensor.clone(), a_tensor())
    assert store.arena.peak <= 6 * PAGE, "of a tensor's own parts some are read ahead"


def test_where_nvme_is_full_dram_does_not_fill_up_instead(tmp_path: Path) -> None:
    small = Store(tmp_path, dram=8 * PAGE, capacity=16 * 1024)
    with pytest.raises(TierFull):
        small.put(torch.ones(3 * PAGE))
    assert small.used == small.arena.used == 0
    small.close()


def test_where_there_is_no_room_nothing_changes(tmp_path: Path) -> None:
    small = Store(tmp_path, dram=2 * PAGE, capacity=16 * 1024)
    tensor = torch.ones(3 * PAGE)
    with pytest.raises(TierFull):
        small.put(tensor)
    assert torch.equal(tensor, torch.ones(3 * PAGE))
    assert small.used == 0
    small.close()
