from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from migrator.lanes import peaks

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
    remembered: tuple[dict[int, Any], ...] = (peaks._before, peaks._unread, peaks._highest)
    for each in remembered:
        each.clear()
    yield allocator
    for each in remembered:
        each.clear()


def seen_by_the_program() -> int:
    return int(peaks._stats()["allocated_bytes"]["all"]["peak"])


def test_laps_tell_peaks_of_their_own_and_the_period_its_highest(allocator: Allocator) -> None:
    peaks.restart(DEVICE)
    laps = []
    for up, down in ((5, 3), (9, 9), (1, 0)):
        allocator.use(up)
        allocator.use(-down)
        laps.append(peaks.lap(DEVICE))
    assert laps == [5, 11, 3]
    assert peaks.since_restart(DEVICE) == 11
    peaks.restart(DEVICE)
    assert peaks.since_restart(DEVICE) == 3


def test_the_program_sees_the_peak_since_its_own_reset(allocator: Allocator) -> None:
    allocator.use(20)
    allocator.use(-20)
    peaks.restart(DEVICE)
    allocator.use(7)
    peaks.lap(DEVICE)
    assert seen_by_the_program() == 20
    peaks._reset()
    assert seen_by_the_program() == 7
    allocator.use(1)
    allocator.use(-1)
    peaks.lap(DEVICE)
    assert seen_by_the_program() == 8
    assert peaks._stats()["num_alloc_retries"] == 3


def test_what_there_was_at_restarts_is_looked_through_when_somebody_asks(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps begin with a restart, while the device has nothing to do."""
    with monkeypatch.context() as patched:
        patched.setattr(peaks, "_keep_peaks", lambda *_: pytest.fail("looked through"))
        for size in (5, 9, 2):
            allocator.use(size)
            assert peaks.restart(DEVICE) == 3
            allocator.use(-size)
    assert seen_by_the_program() == 9
    peaks.restart(DEVICE)
    allocator.use(4)
    assert peaks.since_restart(DEVICE) == 4
    peaks.restart(DEVICE)
    peaks._reset()
    assert seen_by_the_program() == 4
