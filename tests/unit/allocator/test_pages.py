"""The allocator of a process, which has every GPU's periods."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.one_core import OnOneCore, step
from torch_tiers.allocator.native import DRAM, Core
from torch_tiers.allocator.native.pytorch import adapter
from torch_tiers.allocator.pages import PageAllocator
from torch_tiers.allocator.sizes import MiB


def test_gpus_are_known_from_their_first_requests_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are asked for in every step: of those that are known the adapter is not asked again."""
    cores: list[Core | None] = [Core("memfd", hbm=64 * MiB, dram=0), None]
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cores))
    monkeypatch.setattr(adapter, "core_of", lambda library, device: asked.append(device) or cores[device])
    pages = PageAllocator(Path(), 64 * MiB, 0, None)
    assert [device for device, _ in pages.cores()] == [0]
    cores[1] = Core("memfd", hbm=64 * MiB, dram=0)
    pages.begin()
    for core in filter(None, cores):
        step(core, 4 * MiB)
    pages.period_over()
    assert [core.counts().hbm for _, core in pages.cores()] == [4 * MiB] * 2
    assert asked == [0, 1, 1]


def test_before_the_first_request_there_is_nothing_to_give_back(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "core_of", lambda library, device: None)
    OnOneCore(core).tidy(torch.device("cuda", 1))


def test_what_is_no_gpu_has_no_pages(pages: OnOneCore) -> None:
    """Also where a model on the host trains beside one on a GPU."""
    assert pages.residence(torch.device("cpu")) is None


def test_the_budget_of_a_gpu_is_what_its_core_may_map_of_hbm(pages: OnOneCore, core: Core) -> None:
    """Not what is free and reserved: what is reserved may lie in DRAM, and plans would keep what does not fit."""
    assert pages.more(64 * MiB)
    lies = core.allocate(64 * MiB), core.allocate(8 * MiB)
    assert core.on(lies[1], DRAM)
    assert pages.limit(torch.device("cuda", 0)) == 64 * MiB
    assert pages.limit(torch.device("cpu")) == 0
