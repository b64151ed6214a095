from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torch_tiers.migrator.streams import peaks

DEVICE = torch.device("cuda", 0)


class Allocator:
    """Statistics as PyTorch's allocator keeps them."""

    def __init__(self) -> None:
        self.current = self.peak = 0

    def use(self, nbytes: int) -> None:
        self.current += nbytes
        self.peak = max(self.peak, self.current)

    def stats(self, device: object = None) -> dict[str, Any]:
        return {"allocated_bytes": {"all": {"current": self.current, "peak": self.peak}}, "num_alloc_retries": 3}

    def reset(self, device: object = None) -> None:
        self.peak = self.current


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    allocator = Allocator()
    monkeypatch.setattr(peaks, "_plain_stats", allocator.stats)
    monkeypatch.setattr(peaks, "_plain_reset", allocator.reset)
    monkeypatch.setattr(peaks, "_index", lambda device: 0)
    remembered: tuple[dict[int, Any], ...] = (peaks._before, peaks._unread)
    for each in remembered:
        each.clear()
    yield allocator
    for each in remembered:
        each.clear()


def seen_by_the_program() -> int:
    return int(peaks._stats()["allocated_bytes"]["all"]["peak"])


def test_parts_tell_peaks_of_their_own_and_the_iteration_its_highest(allocator: Allocator) -> None:
    of_device = peaks.PeaksOfPyTorch(DEVICE)
    of_device.restart()
    taken = []
    for up, down in ((5, 3), (9, 9), (1, 0)):
        allocator.use(up)
        allocator.use(-down)
        taken.append(of_device.take_peak())
    assert taken == [5, 11, 3]
    assert of_device.restart() == (11, 3)
    assert of_device.restart() == (3, 3)


def test_the_program_sees_the_peak_since_its_own_reset(allocator: Allocator) -> None:
    allocator.use(20)
    allocator.use(-20)
    of_device = peaks.PeaksOfPyTorch(DEVICE)
    of_device.restart()
    allocator.use(7)
    of_device.take_peak()
    assert seen_by_the_program() == 20
    peaks._reset()
    assert seen_by_the_program() == 7
    allocator.use(1)
    allocator.use(-1)
    of_device.take_peak()
    assert seen_by_the_program() == 8
    assert peaks._stats()["num_alloc_retries"] == 3


def test_what_there_was_at_restarts_is_looked_through_when_somebody_asks(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps begin with a restart, while the device has nothing to do."""
    of_device = peaks.PeaksOfPyTorch(DEVICE)
    with monkeypatch.context() as patched:
        patched.setattr(peaks, "_keep_peaks", lambda *_: pytest.fail("looked through"))
        for size, peak in ((5, 5), (9, 9), (2, 9)):
            allocator.use(size)
            assert of_device.restart() == (peak, 3)
            allocator.use(-size)
    assert seen_by_the_program() == 9
    of_device.restart()
    allocator.use(4)
    assert of_device.restart() == (4, 3)
    peaks._reset()
    assert seen_by_the_program() == 4


def test_what_nobody_asks_for_does_not_pile_up(allocator: Allocator) -> None:
    """In a planned iteration no peak is taken, and a program may never ask for its peaks."""
    of_device = peaks.PeaksOfPyTorch(DEVICE)
    allocator.use(20)
    allocator.use(-20)
    for _ in range(1000):
        of_device.restart()
        assert len(peaks._unread.get(0, [])) < peaks.MOST_UNREAD
    assert seen_by_the_program() == 20
