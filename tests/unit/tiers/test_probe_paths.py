"""The paths that need no GPU, on small sizes: they move what they say, and leave nothing behind."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path as Folder
from typing import Any

import pytest
import torch

from tests.unit.store_faults import FaultyFile, fail, flip
from torch_tiers.allocator.nvme.backend import Backend
from torch_tiers.allocator.nvme.posix import PosixFile
from torch_tiers.allocator.nvme.store import NvmeStore
from torch_tiers.allocator.sizes import KiB, MiB
from torch_tiers.probe import disk
from torch_tiers.probe.affinity import Node
from torch_tiers.probe.buffers import DramBuffer, read_in_slices
from torch_tiers.probe.catalogue import Disks, catalogue, selected
from torch_tiers.probe.disk import DiskPath, Way
from torch_tiers.probe.host import HostMemory, MemcpyPath
from torch_tiers.probe.machine import parse_answer
from torch_tiers.probe.measure import Effort, Waived, measure_path, window
from torch_tiers.probe.pattern import fill, matches
from torch_tiers.probe.results import Path

NODE = Node(0, frozenset(os.sched_getaffinity(0)))
SMALL = Effort(sizes=(4 * KiB, 64 * KiB), samples=2)


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    memory = HostMemory(2 * window(64 * KiB), pinned=False)
    yield memory
    memory.close()


def disk_path(memory: HostMemory, folder: Folder, way: Way, backend=PosixFile, **more) -> DiskPath:
    def open_store(capacity: int) -> NvmeStore:
        return NvmeStore([folder], capacity, gds="off", checksum=False, step=disk.STEP, backend=backend)

    path = Path(f"disk_{way}", "dram0", "nvme")
    return DiskPath(path, way, DramBuffer(memory, NODE), [folder], open_store, NODE.cores, **more)


# -------------------------------------------------------------------------------------------- data


def test_a_pattern_is_known_by_its_salt_and_by_every_byte() -> None:
    data = torch.empty(64 * KiB, dtype=torch.uint8)
    fill(data, salt=7)
    assert matches(data, 7)
    assert not matches(data, 8)
    data[-1] ^= 1
    assert not matches(data, 7)


# ------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("threads", [1, 3])
def test_memcpy_moves_all_of_it(memory: HostMemory, threads: int) -> None:
    found = measure_path(MemcpyPath("memcpy", memory, NODE, NODE, threads), SMALL, seconds=60)
    assert found.status == "measured"
    assert [sample.nbytes for sample in found.samples] == [window(size) for size in SMALL.sizes]


def test_a_node_without_cores_is_waived(memory: HostMemory) -> None:
    barred = Node(1, frozenset())
    assert "NUMA node 1" in (MemcpyPath("memcpy", memory, NODE, barred, 1).why_not() or "")
    with pytest.raises(Waived):
        memory.take(barred, MiB)


def test_memory_is_given_back_after_every_size(memory: HostMemory) -> None:
    for _ in range(3):  # the arena holds one window of each end, so a leak would run it full
        assert measure_path(MemcpyPath("memcpy", memory, NODE, NODE, 1), SMALL, 5).status == "measured"


# ------------------------------------------------------------------------------------------- disks


@pytest.mark.parametrize("way", ["write", "read"])
def test_a_disk_path_moves_all_of_it_and_leaves_nothing(memory: HostMemory, tmp_path: Folder, way: Way) -> None:
    found = measure_path(disk_path(memory, tmp_path, way), SMALL, seconds=60)
    assert (found.status, found.reason) == ("measured", "")
    assert [sample.nbytes for sample in found.samples] == [window(size) for size in SMALL.sizes]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", ["write", "read"])
def test_a_bit_that_flips_on_disk_fails_the_path(memory: HostMemory, tmp_path: Folder, way: Way) -> None:
    def backend(path: Folder) -> Backend:
        return FaultyFile(PosixFile(path), reads={0: flip(bit=3)}, twice=True)

    found = measure_path(disk_path(memory, tmp_path, way, backend), SMALL, seconds=60)
    assert found.status == "failed"
    assert "did not arrive" in found.reason


def test_an_error_of_the_drive_fails_the_path_and_names_it(memory: HostMemory, tmp_path: Folder) -> None:
    def backend(path: Folder) -> Backend:
        return FaultyFile(PosixFile(path), writes={5: fail(errno.EIO)}, twice=True)

    found = measure_path(disk_path(memory, tmp_path, "write", backend), SMALL, seconds=60)
    assert found.status == "failed"
    assert str(tmp_path) in found.reason


def test_a_full_disk_waives_the_path(memory: HostMemory, tmp_path: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: disk.shutil._ntuple_diskusage(9, 8, 1))
    found = measure_path(disk_path(memory, tmp_path, "write"), SMALL, seconds=60)
    assert found.status == "waived"
    assert "free" in found.reason


def test_successive_runs_go_round_the_ring(memory: HostMemory, tmp_path: Folder) -> None:
    path = disk_path(memory, tmp_path, "read", ring=3 * window(4 * KiB))
    path.prepare(4 * KiB)
    try:
        seen = []
        for _ in range(4):
            path.run(4 * KiB)
            assert path.intact()
            seen.append(path._last)
    finally:
        path.release()
    assert seen[0] is seen[3]
    assert len({id(batch) for batch in seen}) == 3


def test_a_slice_is_on_its_way_while_the_next_is_read(memory: HostMemory, tmp_path: Folder) -> None:
    gate = threading.Event()

    class Gated(PosixFile):
        def pread(self, block: torch.Tensor, offset: int) -> int:
            if offset:
                assert gate.wait(30)
            return super().pread(block, offset)

    store = NvmeStore([tmp_path], 2 * MiB, gds="off", stripe=MiB, step=MiB, depth=2, backend=Gated)
    extent, block = store.allocate(2 * MiB), memory.take(NODE, 2 * MiB)
    assert extent is not None
    block.tensor.fill_(7)
    store.write(extent, block.tensor).result()
    block.tensor.zero_()
    slices = read_in_slices(store, [extent], [block.tensor])
    assert next(slices) == [(0, 0, MiB)]
    assert set(block.tensor[:MiB].tolist()) == {7}
    gate.set()
    assert list(slices) == [[(0, MiB, MiB)]]
    store.close()
    memory.give(NODE, block)


def test_slices_that_came_meanwhile_are_handed_on_together() -> None:
    """A copy for each took the interpreter's lock from the threads that read, and a third of their speed."""

    class AtOnce:
        def read(self, extent: object, part: torch.Tensor, arrived: Callable[[int, int], None]) -> Future[None]:
            for start in range(0, part.numel(), 4):
                arrived(start, 4)
            done: Future[None] = Future()
            done.set_result(None)
            return done

    parts = torch.zeros(16, dtype=torch.uint8).split(8)
    store: Any = AtOnce()
    slices = read_in_slices(store, [store, store], parts)
    assert list(slices) == [[(0, 0, 4), (0, 4, 4), (1, 0, 4), (1, 4, 4)]]


def test_without_a_directory_disk_paths_say_how_to_name_one(memory: HostMemory) -> None:
    probes = selected(catalogue([], [NODE], memory, Disks((), True)), ["disk_*"])
    assert [probe.path.kind for probe in probes] == ["disk_write", "disk_read"]
    assert all("--nvme-path" in (probe.why_not() or "") for probe in probes)


# --------------------------------------------------------------------------------------- catalogue


def test_every_pair_of_nodes_has_its_memcpy(memory: HostMemory) -> None:
    probes = selected(catalogue([], [NODE, Node(1, NODE.cores)], memory, Disks((), True)), ["memcpy"])
    assert {(probe.path.source, probe.path.destination) for probe in probes} == {
        (f"dram{a}", f"dram{b}") for a in range(2) for b in range(2)
    }


def test_a_lane_is_measured_by_the_path_of_its_name(memory: HostMemory) -> None:
    for probe in catalogue([], [NODE], memory, Disks((), True)):
        assert probe.path.lane in (None, probe.path.kind)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_paths_are_waived(memory: HostMemory, tmp_path: Folder) -> None:
    probes = catalogue([], [NODE], memory, Disks((tmp_path,), True))
    refusals = {probe.path.kind: probe.why_not() for probe in probes}
    assert [kind for kind, refusal in refusals.items() if refusal is None] == [
        "memcpy",
        "memcpy.all_cores",
        "disk_write",
        "disk_read",
    ]
    assert refusals["d2h"] == refusals["gds_read"] == "no CUDA device"


# ----------------------------------------------------------------------------------------- machine


def test_the_answer_of_nvidia_smi_is_read_by_key() -> None:
    answer = parse_answer("580.65, 00000000:1B:00.0, 5, 5, 16, 1980, 1980\n")
    assert (answer["driver"], answer["generation"], answer["width"], answer["clock"]) == ("580.65", "5", "16", "1980")
    assert parse_answer("") == parse_answer("no devices were found") == {}
