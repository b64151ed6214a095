"""The direct lane over a cuFile that misbehaves: what comes back is what left, or an error, and it is said once."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.by_hand import eventually
from tests.unit.fake_kvikio import Double, FakeKvikio
from tests.unit.migrator.offload.direct_rig import SLOT, Rig
from torch_tiers.allocator.errors import CorruptionError, StoreError
from torch_tiers.allocator.nvme.kvikio import Mode
from torch_tiers.allocator.nvme.posix import PosixFile
from torch_tiers.migrator.offload.group import Group, Saved, State

SIZES = (5000, 3 * SLOT, 1, 2 * SLOT + 700)  # across slots, and more than a ring has
GROUPS = 6
CHUNKS = 6 * GROUPS  # each a request of its own, if none is cut short

Offloaded = tuple[Group, list[Saved], list[torch.Tensor]]


@pytest.fixture
def mode() -> Mode:
    return "gds"


@pytest.fixture
def double(fake: FakeKvikio) -> Double:
    return fake.double


@pytest.fixture
def rig(double: Double, mode: Mode, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, mode=mode)
    yield rig
    rig.close()


@pytest.fixture(autouse=True)
def by_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)


def offloaded(rig: Rig, groups: int = GROUPS) -> list[Offloaded]:
    """Groups that have left HBM."""
    made = [rig.offload(*SIZES) for _ in range(groups)]
    rig.release()
    assert [group.state for group, *_ in made] == [State.AWAY] * groups
    return made


def come_back_right(rig: Rig, groups: list[Offloaded]) -> bool:
    return all(
        torch.equal(rig.back(each), content)
        for _, saved, contents in groups
        for each, content in zip(saved, contents, strict=True)
    )


def assert_nothing_is_left(rig: Rig) -> None:
    rig.forget()
    assert eventually(lambda: rig.store.used == 0)
    assert rig.arena.peak == 0


def refuse(self: PosixFile, block: torch.Tensor, offset: int) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("calls", ["read", "write"])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(("fault", "takes_more_calls"), [("short", True), ("late", False)])
def test_short_and_late_transfers_are_awaited_and_nothing_is_said(
    rig: Rig,
    double: Double,
    caplog: pytest.LogCaptureFixture,
    calls: str,
    every: int,
    fault: str,
    takes_more_calls: bool,
) -> None:
    double.inject(calls, fault, every=every)
    groups = offloaded(rig)
    assert come_back_right(rig, groups)
    assert (double.calls(calls) > CHUNKS) == takes_more_calls
    assert double.calls("write" if calls == "read" else "read") == CHUNKS
    moved = rig.counters.moved
    assert moved["d2h"] == moved["h2d"] == 0
    assert moved["gds_write"] == moved["gds_read"] == sum(group.stored.nbytes for group, *_ in groups if group.stored)
    assert not caplog.records and not rig.store.bounced
    assert_nothing_is_left(rig)


@pytest.mark.parametrize("calls", ["read", "write"])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("fault", ["failed", "refused", "torn", "none", "odd", "more"])
def test_what_cufile_fails_at_goes_through_host_memory_without_loss_which_is_said_once(
    rig: Rig, double: Double, caplog: pytest.LogCaptureFixture, calls: str, every: int, fault: str
) -> None:
    double.inject(calls, fault, every=every)
    groups = offloaded(rig)
    assert come_back_right(rig, groups)
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("GPUDirect Storage at ") and line.endswith("): what is left goes through host memory")
    assert rig.store.bounced > 0, "what passed host memory is told"
    if every == 1:  # until it is called no more; others may have been on their way
        assert 3 <= double.calls(calls) < CHUNKS
        assert rig.store.bounced >= rig.counters.moved[f"gds_{calls}"]
    assert_nothing_is_left(rig)


@pytest.mark.parametrize("mode", ["auto"])
def test_a_file_that_cufile_refuses_is_filled_through_host_memory_which_is_said_once(
    double: Double, mode: Mode, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    double.inject("handle", "refused")
    rig = Rig(tmp_path, mode=mode)
    assert come_back_right(rig, offloaded(rig))
    assert double.calls("write") == double.calls("read") == 0
    assert ["5008" in record.getMessage() for record in caplog.records] == [True]
    assert_nothing_is_left(rig)
    rig.close()


def test_what_cufile_and_the_system_fail_to_write_stays_in_the_hosts_memory_which_is_said_once(
    rig: Rig, double: Double, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    double.inject("write", "failed")
    monkeypatch.setattr(PosixFile, "pwrite", refuse)
    groups = offloaded(rig)
    assert come_back_right(rig, groups)
    assert rig.counters.moved["gds_read"] == 0
    assert rig.counters.moved["d2h"] == rig.counters.moved["h2d"] > 0
    told = [record.getMessage() for record in caplog.records]
    for text in ("GPUDirect Storage at ", "nvme refused a write; refused bytes stay in host memory"):
        assert sum(line.startswith(text) for line in told) == 1
    assert_nothing_is_left(rig)


@pytest.mark.parametrize(
    ("calls", "fault", "error"),
    [
        ("read", "failed", StoreError),  # and the system fails, too
        ("read", "flipped", CorruptionError),
        ("read", "lost", CorruptionError),
        ("read", "shifted", CorruptionError),
        ("write", "flipped", CorruptionError),
        ("write", "lost", CorruptionError),
    ],
)
def test_bytes_that_cannot_be_had_are_an_error_and_never_others(
    rig: Rig, double: Double, monkeypatch: pytest.MonkeyPatch, calls: str, fault: str, error: type[StoreError]
) -> None:
    monkeypatch.setattr(PosixFile, "pread", refuse)
    double.inject(calls, fault)
    for _, saved, _ in offloaded(rig):
        with pytest.raises(error):
            rig.back(saved[1])
    assert_nothing_is_left(rig)


def test_a_group_that_dies_while_it_is_written_late_spoils_none_that_follows(rig: Rig, double: Double) -> None:
    """Its extent must not be another's before the drive has done with it."""
    double.inject("write", "late", every=2)
    for _ in range(4):
        rig.offload(SLOT)  # late
        rig.release()
        rig.forget()
        _, saved, contents = rig.offload(SLOT)  # at once
        rig.release()
        rig.rings[0].drain()
        assert torch.equal(rig.back(saved[0]), contents[0])
        del saved
        rig.forget()
    assert_nothing_is_left(rig)


def test_a_group_that_dies_while_it_is_read_late_spoils_none_that_follows(rig: Rig, double: Double) -> None:
    double.inject("read", "late", every=2)
    for _ in range(4):
        groups = offloaded(rig, groups=2)
        for group, *_ in groups:
            with rig.engine.lock:
                rig.engine._bring(group)
        del groups
        rig.forget()
        assert come_back_right(rig, offloaded(rig, groups=2))
        rig.forget()
    assert_nothing_is_left(rig)


@pytest.mark.parametrize("calls", ["read", "write"])
def test_the_end_waits_for_late_transfers_before_it_deregisters_slots(rig: Rig, double: Double, calls: str) -> None:
    double.inject(calls, "late")
    for group, *_ in offloaded(rig, groups=2):
        if calls == "read":
            with rig.engine.lock:
                rig.engine._bring(group)
    rig.direct.close()
    assert double.calls(calls) == 12
    assert all(ring._freed for ring in rig.rings)


@pytest.mark.filterwarnings("default:.* is multi-threaded, use of fork")
def test_a_child_that_is_forked_from_a_busy_lane_makes_no_call_and_its_parent_goes_on(rig: Rig, double: Double) -> None:
    double.inject("write", "late", every=2)
    groups = offloaded(rig)
    if (child := os.fork()) == 0:
        status = 1
        try:
            rig.direct.close()
            for ring in rig.rings:
                ring.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert come_back_right(rig, groups)
    assert_nothing_is_left(rig)
