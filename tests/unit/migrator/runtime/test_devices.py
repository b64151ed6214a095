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
