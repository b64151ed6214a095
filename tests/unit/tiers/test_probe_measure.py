"""How a path is measured, on paths that no hardware stands behind."""

from __future__ import annotations

import os

import pytest
import torch

from tests.unit.probe_fakes import GB, FakePath
from torch_tiers.allocator.errors import StoreError, TierFull, TiersError
from torch_tiers.allocator.sizes import GiB, KiB, MiB
from torch_tiers.probe.affinity import nodes, on_cores
from torch_tiers.probe.contention import levels, under_load
from torch_tiers.probe.load import HostLoad
from torch_tiers.probe.measure import SIZES, Effort, Waived, copies, measure, measure_path, window
from torch_tiers.probe.results import Sample

TWO = Effort(sizes=(KiB * 4, MiB), samples=3)


def test_sizes_go_from_4_kib_to_1_gib() -> None:
    assert SIZES[0] == 4 * KiB
    assert SIZES[-1] == GiB


@pytest.mark.parametrize("size", SIZES)
def test_small_copies_are_queued_together_within_bounds(size: int) -> None:
    assert 1 <= copies(size) <= 32
    assert window(size) <= max(size, 64 * MiB)


def test_the_run_in_the_middle_counts() -> None:
    assert Sample(MiB, 10, (1.0, 100.0, 2.0)).bandwidth == 5.0


def test_each_size_is_warmed_up_checked_run_and_released() -> None:
    path = FakePath()
    found = measure_path(path, Effort(sizes=(MiB,), samples=3), seconds=10)
    assert path.diary == ["prepare", "run", "intact", "run", "run", "run", "release"]
    assert found.status == "measured"
    assert found.samples[0].bandwidth == pytest.approx(GB)
    assert len(found.samples[0].seconds) == 3


def test_checking_can_be_left_out() -> None:
    path = FakePath()
    measure_path(path, Effort(sizes=(MiB,), verify=False), seconds=10)
    assert "intact" not in path.diary


def test_wrong_data_fails_the_path_and_keeps_the_sizes_that_were_right() -> None:
    found = measure_path(FakePath(wrong=MiB), TWO, seconds=10)
    assert found.status == "failed"
    assert "1.0 MiB" in found.reason
    assert len(found.samples) == 1


def test_a_path_that_cannot_run_is_waived_with_its_reason_and_never_touched() -> None:
    path = FakePath(refusal="no CUDA device")
    (found,) = measure([path], lambda path: TWO, seconds=10)
    assert (found.status, found.reason) == ("waived", "no CUDA device")
    assert path.diary == []


@pytest.mark.parametrize(
    "error", [Waived("disk too small"), TierFull("dram", None, 2, 1, 1), torch.OutOfMemoryError("too large")]
)
def test_a_size_for_which_there_is_no_room_ends_the_path(error: Exception) -> None:
    path = FakePath(errors={MiB: error})
    found = measure_path(path, TWO, seconds=10)
    assert found.status == "measured"
    assert found.reason == f"stopped before 1.0 MiB: {error}"
    assert path.diary[-1] == "release"


def test_a_path_without_room_for_its_smallest_size_is_waived() -> None:
    found = measure_path(FakePath(errors={4 * KiB: Waived("disk full")}), TWO, seconds=10)
    assert (found.status, found.reason) == ("waived", "disk full")


@pytest.mark.parametrize("error", [StoreError("/mnt", 0, 0, "read", "EIO"), RuntimeError("CUDA error: x\nlong")])
def test_an_error_fails_the_path_with_one_line_and_the_next_is_measured(error: Exception) -> None:
    broken, sound = measure([FakePath(errors={MiB: error}), FakePath()], lambda path: TWO, seconds=10)
    assert broken.status == "failed"
    assert "\n" not in broken.reason
    assert sound.status == "measured"


def test_a_size_that_would_take_too_long_is_left_out() -> None:
    found = measure_path(FakePath(speed=1.0), TWO, seconds=5)
    assert [sample.size for sample in found.samples] == [4 * KiB]
    assert "--seconds" in found.reason


def test_a_sustained_run_drops_its_first_half() -> None:
    path = FakePath()
    found = measure_path(path, Effort(sizes=(MiB,), samples=None), seconds=0.01)
    runs = path.diary.count("run") - 1
    assert len(found.samples[0].seconds) == runs - runs // 2


def test_every_path_is_announced() -> None:
    heard: list[str] = []
    measure([FakePath(), FakePath(refusal="no")], lambda path: TWO, 1, heard.append)
    assert heard == ["fake dram0>dram0"] * 2


def test_the_cores_of_the_caller_come_back() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(KeyError), on_cores(frozenset([min(before)])):
        assert os.sched_getaffinity(0) == {min(before)}
        raise KeyError
    assert os.sched_getaffinity(0) == before


def test_this_machine_has_a_node_with_cores() -> None:
    assert any(node.cores for node in nodes())


@pytest.mark.parametrize(("cores", "counts"), [(1, [0, 1]), (2, [0, 1, 2]), (6, [0, 1, 2, 4, 6]), (8, [0, 1, 2, 4, 8])])
def test_load_doubles_up_to_all_cores(cores: int, counts: list[int]) -> None:
    assert levels(cores) == counts


def test_a_path_is_measured_at_every_load_and_the_load_is_real() -> None:
    path, memcpy = FakePath(), FakePath()
    results = measure([path, memcpy], lambda path: TWO, seconds=1)
    waived = FakePath(refusal="no")
    results += measure([waived], lambda path: TWO, seconds=1)
    loaded, _, still_waived = under_load([path, memcpy, waived], results, MiB, workers=1, seconds=1.5)
    assert [sample.workers for sample in loaded.loaded] == [0, 1]
    idle, busy = loaded.loaded
    assert idle.host_traffic == 0 < busy.host_traffic
    assert still_waived.status == "waived"


def test_the_processes_that_load_end_with_the_load() -> None:
    load = HostLoad(1, frozenset(os.sched_getaffinity(0)))
    with load:
        load.set(1)
    assert not any(worker.is_alive() for worker in load._workers)


def test_processes_that_do_not_start_in_time_are_one_line_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_tiers.probe.load._STARTED_WITHIN", 0.001)
    with pytest.raises(TiersError, match=r"^not all 1 processes .* 128 MiB to spare, or leave --contention out$"):
        HostLoad(1, frozenset(os.sched_getaffinity(0))).__enter__()
