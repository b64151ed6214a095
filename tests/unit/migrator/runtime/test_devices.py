from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.scenarios import moving, perceptron, train
from torch_tiers.allocator.errors import TiersError
from torch_tiers.migrator.model.links import PCIE_GEN5
from torch_tiers.migrator.offload.direct import DirectWay
from torch_tiers.migrator.runtime import devices
from torch_tiers.migrator.runtime.devices import Device, Devices, holes
from torch_tiers.migrator.streams.host import HostCompute, HostLane
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
        settle_budget=None,
        below=dict,
        hbm=lambda device: 50,
        pages=lambda: None,
        enforce=True,
        direct=lambda _: None,
        links=links,
    )
    every._open(GPU, options)
    assert fractions == [0.5, 1.0]


class Ring:
    """Slots of one size, as far as a budget is concerned."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes_total = self.slot_bytes = nbytes
        self.closed = False

    def drain(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def way(ring: int, scratch: int) -> Any:
    return DirectWay(SimpleNamespace(scratch=scratch, stuck=False), Ring(ring), Ring(ring))  # type: ignore[arg-type]


def test_what_lies_beside_an_allocator_is_within_the_budget(
    emptied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's might fill the budget, and staging slots and checksums took 152 MiB more."""
    fractions: list[float] = []
    made = Device(HostCompute(Counters()), None, None, 50)  # type: ignore[arg-type]
    monkeypatch.setattr(devices, "open_device", lambda *args, **named: made)
    monkeypatch.setattr(
        devices, "lanes", lambda device, names, *_, **__: [HostLane(name, Counters()) for name in names]
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, device: fractions.append(part))
    allocator, larger = Withholding(50), Withholding(80)  # that of an earlier session with a larger budget
    for pages, enforce in ((None, True), (allocator, False), (larger, False)):
        every: Any = Devices(Counters())
        options = SimpleNamespace(
            settle_budget=None,
            below=dict,
            hbm=lambda device: 50,
            pages=lambda pages=pages: pages,
            enforce=enforce,
            direct=lambda _: way(ring=10, scratch=5),
            links=PCIE_GEN5,
        )
        shared = every._open(GPU, options)
        assert (shared.budget, shared.room) == (50, 25)
        every.opened[GPU] = replace(shared, out=HostLane("d2h", Counters()), back=HostLane("h2d", Counters()))
        every.close()
    assert fractions[0] == 0.25
    assert allocator.withheld == [25, 0]  # it lasts longer than the session
    assert larger.withheld == [25 + 30, 0]


@pytest.mark.parametrize("with_pages", [True, False])
def test_of_two_threads_that_know_what_an_iteration_needs_the_first_settles_the_budget(
    emptied: list[str], monkeypatch: pytest.MonkeyPatch, *, with_pages: bool
) -> None:
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 12)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1000))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, device: fractions.append(part))
    allocator, every = Withholding(100), Devices(Counters())
    every.opened[GPU] = Device(HostCompute(Counters()), None, None, 100, provisional=True)  # type: ignore[arg-type]
    options: Any = SimpleNamespace(
        settle_budget=lambda device, needed, most: min(needed, most), pages=lambda: allocator if with_pages else None
    )
    for needed in (60, 80):
        every.settle_budget(GPU, needed, options)
        assert every.opened[GPU].budget == 60
    assert allocator.withheld == ([40] if with_pages else [])
    assert fractions == ([] if with_pages else [0.06])
    assert emptied == ([] if with_pages else ["emptied"])  # which PyTorch would keep reserved
    assert every.opened[GPU].holes == (0 if with_pages else 2)  # which the first steps left, and plans cannot have


class Withholding:
    """An allocator that keeps some of its budget for others."""

    def __init__(self, budget: int) -> None:
        self.withheld: list[int] = []
        self._budget = budget

    def limit(self, device: torch.device) -> int:
        return self._budget

    def peaks(self, device: torch.device) -> None:
        """Nobody asks."""

    def tidy(self, device: torch.device) -> None:
        """Nor for this."""

    def withhold(self, device: torch.device, nbytes: int) -> None:
        self.withheld.append(nbytes)


def test_a_direct_way_that_takes_all_of_the_budget_is_refused() -> None:
    every: Any = Devices(Counters())
    refused = way(ring=20, scratch=10)
    made = Device(HostCompute(Counters()), None, None, 50)  # type: ignore[arg-type]
    with pytest.raises(TiersError, match="raise TIERS_HBM"):
        every._with_direct_way(made, GPU, SimpleNamespace(direct=lambda _: refused))
    assert refused.out.closed and refused.back.closed


def test_an_end_that_is_interrupted_goes_on_with_the_others() -> None:
    """Ctrl-C while a drive was waited for left the lanes' threads and all limits."""

    class Interrupted:
        def close(self) -> None:
            raise KeyboardInterrupt

    every: Any = Devices(Counters())
    out, back = HostLane("d2h", Counters()), HostLane("h2d", Counters())
    every.opened[GPU] = Device(HostCompute(Counters()), out, back, 50, direct=Interrupted())  # type: ignore[arg-type]
    closed: list[str] = []
    every._backing = SimpleNamespace(close=lambda: closed.append("backing"))
    with pytest.raises(KeyboardInterrupt):
        every.close()
    assert closed == ["backing"]
    assert not out._thread.is_alive() and not back._thread.is_alive()


def test_several_iterations_are_recorded_before_the_first_plan_with_and_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one alone, the first that is warm, times were up to twice as long as later ones took."""
    monkeypatch.setattr(devices, "RECORDINGS", 3)
    model = perceptron(torch.device("cpu"))
    with moving() as session:
        train(model, torch.device("cpu"), steps=3)
        assert session.runtime.learned is None
        train(model, torch.device("cpu"), steps=6)
        assert session.runtime.learned is not None
