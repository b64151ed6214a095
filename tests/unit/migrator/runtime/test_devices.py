from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_tiers.migrator.lanes.host import HostCompute
from torch_tiers.migrator.runtime import devices
from torch_tiers.migrator.runtime.devices import Device, Devices, holes
from torch_tiers.migrator.telemetry.counters import Counters

GPU = torch.device("cuda", 0)


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 70)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100 if calls else 300)
    return calls


def test_holes_are_what_cannot_be_given_back(emptied: list[str]) -> None:
    assert holes(GPU) == 30


def test_nothing_is_given_back_while_a_graph_is_captured(emptied: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert holes(GPU) == 0
    assert not emptied


def test_a_limit_that_is_set_while_another_thread_lifts_all_is_lifted_as_well(
    emptied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed: what found no room below that device was out of memory."""
    fractions: list[float] = []

    def set_fraction(fraction: float, device: torch.device) -> None:
        if not fractions:
            every._lift_limits()
        fractions.append(fraction)

    made = Device(HostCompute(Counters()), None, None, 50)  # type: ignore[arg-type]
    every: Any = Devices(Counters())
    monkeypatch.setattr(devices, "open_device", lambda *args, **named: made)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_fraction)
    links = SimpleNamespace(staged=made.links)
    options = SimpleNamespace(
        hbm=lambda device: 50, pages=lambda: None, native_lanes=False, enforce=True, direct=lambda _: None, links=links
    )
    every._open(GPU, options)
    assert fractions == [0.5, 1.0]


class Lender:
    """An allocator with HBM that is free beyond its budget."""

    def __init__(self) -> None:
        self.lent: list[int] = []

    def free_beyond(self, device: torch.device) -> int:
        return 0 if self.lent else 40

    def lend(self, device: torch.device, nbytes: int) -> None:
        self.lent.append(nbytes)


def test_threads_of_a_gpu_share_what_is_lent_and_the_last_one_pays_it_back() -> None:
    """The second one found nothing free, and so took the first one's back."""
    every: Any = Devices(Counters())
    lender = Lender()
    backing = SimpleNamespace(has_disk=True, dram_capacity=0)
    assert [every._to_lend(GPU, 100, backing, False, lender) for _ in range(2)] == [40, 40]
    every.pay_back(GPU)
    assert lender.lent == [40]
    every.pay_back(GPU)
    assert lender.lent == [40, 0]
    assert every._to_lend(GPU, 100, backing, True, lender) == 0, "strict"


def test_what_is_lent_is_taken_back_at_the_end() -> None:
    every: Any = Devices(Counters())
    lender = Lender()
    every._to_lend(GPU, 100, SimpleNamespace(has_disk=True, dram_capacity=0), False, lender)
    every.close()
    assert lender.lent == [40, 0]
