"""Without what the adapter needs there is one line that says what is missing, and PyTorch's own allocator."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

from torch_tiers.allocator import native
from torch_tiers.allocator.extensions.extension import CannotBuild
from torch_tiers.allocator.native.pytorch import adapter
from torch_tiers.assembly import Session
from torch_tiers.config import load
from torch_tiers.paging import before_cuda


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)


def test_no_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(CannotBuild, match=r"no C\+\+ compiler found"):
        adapter.build(tmp_path)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has what it takes")
def test_a_torch_without_cuda_is_said(tmp_path: Path) -> None:
    with pytest.raises(adapter.NoAdapter, match="built without CUDA"):
        adapter.build(tmp_path)


def test_what_is_in_the_way_is_known_without_building(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "no C++ compiler found" in (adapter.obstacle() or "")


def test_the_adapter_is_built_anew_when_any_part_of_it_changes() -> None:
    parts = (*adapter.SOURCES, *adapter.HEADERS)
    folder = Path(adapter.__file__).parent
    assert set(parts) >= {*folder.glob("*.cpp"), *folder.glob("*.h")}
    lines = [(part, line) for part in parts for line in part.read_text().splitlines() if line.startswith('#include "')]
    included = {(part.parent / line.split('"')[1]).resolve() for part, line in lines}
    assert included == {header.resolve() for header in adapter.HEADERS}


def test_a_core_that_was_not_built_is_said(tmp_path: Path) -> None:
    with pytest.raises(native.CoreError, match=r"cannot be loaded.*C\+\+ compiler"):
        native.library(tmp_path / "absent.so")


def test_a_machine_without_a_driver_is_said() -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has one")
    with pytest.raises(native.CoreError, match="no CUDA driver"):
        native.Core("cuda", hbm=1 << 30, dram=0)


def test_nothing_is_installed_before_the_program_initialises_cuda(
    with_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: happened.append("init"))
    before_cuda(lambda: happened.append("install"))
    assert happened == []
    torch.cuda._lazy_init()
    torch.cuda._lazy_init()
    assert happened == ["install", "init", "init"]


def test_where_it_cannot_be_pytorchs_own_is_used_and_that_is_said_once(
    with_cuda: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(cache: Path) -> Path:
        raise adapter.NoAdapter("no C++ compiler found")

    monkeypatch.setattr(adapter, "build", refuse)
    made = Session(load({"allocator": "pages", "hbm": "1GiB"}).config)
    with caplog.at_level(logging.WARNING, logger="tiers"):
        made._install_pages()
    assert [record.message for record in caplog.records] == [
        "no C++ compiler found; PyTorch's own allocator is used, with the migrator"
    ]
    assert made.runtime.options.enforce  # the budget holds all the same
    assert made.stats()["allocator"] == "torch"


def test_without_a_gpu_the_migrator_works_on_host_memory(caplog: pytest.LogCaptureFixture) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    with caplog.at_level(logging.WARNING, logger="tiers"):
        before_cuda(lambda: pytest.fail("there is nothing to install"))
    assert "there is no GPU" in caplog.text
