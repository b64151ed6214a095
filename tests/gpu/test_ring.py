"""Staging slots in GPU memory, and the way through host memory that their bytes take where cuFile fails."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from torch_tiers.allocator.nvme.cufile import in_context
from torch_tiers.allocator.nvme.device import DeviceMemory
from torch_tiers.allocator.nvme.kvikio import KvikioFile
from torch_tiers.allocator.nvme.ring import Ring
from torch_tiers.allocator.nvme.store import NvmeStore
from torch_tiers.allocator.sizes import MiB

pytestmark = pytest.mark.gpu


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring(torch.device("cuda", torch.cuda.current_device()), 2, 4 * MiB)
    yield made
    made.close()


def test_slots_are_gpu_memory_outside_of_pytorchs_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.cuda.init()
    device = torch.device("cuda", torch.cuda.current_device())
    before = torch.cuda.memory_reserved()
    freed: list[DeviceMemory] = []
    free = DeviceMemory.free
    monkeypatch.setattr(DeviceMemory, "free", lambda memory: (freed.append(memory), free(memory)))
    ring = Ring(device, 4, 64 * MiB)
    slots = [ring.take() for _ in range(4)]
    assert all(slot.device == device and slot.data_ptr() % 4096 == 0 for slot in slots)
    assert torch.cuda.memory_reserved() == before
    for value, slot in enumerate(slots):
        slot.fill_(value)
    assert [slot.unique().tolist() for slot in slots] == [[0], [1], [2], [3]]
    for slot in slots:
        ring.give(slot)
    ring.close()
    ring.close()
    assert len(freed) == 1


def test_there_are_fewer_slots_where_the_gpu_has_no_room(caplog: pytest.LogCaptureFixture) -> None:
    torch.cuda.init()
    free = torch.cuda.mem_get_info()[0]
    ring = Ring(torch.device("cuda"), 8, free // 4)
    assert 1 <= ring.slots < 8
    assert "has room for" in caplog.text
    ring.close()


def test_a_thread_that_is_new_to_cuda_can_call_the_driver(ring: Ring) -> None:
    slot = ring.take()

    def use() -> None:
        with in_context(slot):
            pass

    with ThreadPoolExecutor(1) as pool:
        pool.submit(use).result()
    ring.give(slot)


class Refused(KvikioFile):
    """cuFile fails at every request."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, mode="auto")

    def _open_cufile(self, mode: str) -> None:
        raise RuntimeError("cuFile error 5008")


def test_gpu_memory_reaches_the_drive_through_host_memory_and_comes_back(ring: Ring, tmp_path: Path) -> None:
    store = NvmeStore([tmp_path], 64 * MiB, gds="off", stripe=MiB, depth=4, step=8 * MiB, backend=Refused)
    out, back = ring.take(), ring.take()
    out.copy_(torch.randint(256, out.shape, dtype=torch.uint8, device=out.device))
    back.zero_()
    torch.cuda.synchronize()
    for _ in range(3):
        extent = store.allocate(out.numel())
        assert extent is not None
        store.write(extent, out).result()
        store.read(extent, back).result()
        assert torch.equal(out, back)
    store.close()
    ring.give(out)
    ring.give(back)
