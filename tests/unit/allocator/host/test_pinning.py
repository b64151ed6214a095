"""Pinning against a driver that is none."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.unit.fake_driver import ROOT, asked, build
from torch_tiers.allocator.host import pinning
from torch_tiers.allocator.host.dram import DramArena
from torch_tiers.allocator.host.pinning import PinningRefused, map_pages, pin, touch
from torch_tiers.allocator.sizes import PAGE

PROGRAM = """
import threading
from contextlib import nullcontext
from types import SimpleNamespace
import torch
from torch_tiers.allocator.host import pinning
answers = []
def answer(*_): answers.append(fake.fake_unsafe()); return answers[-1]
torch.cuda.device = lambda device: nullcontext()
torch.cuda.cudart = lambda: SimpleNamespace(
    cudaHostRegister=answer, cudaHostUnregister=answer, cudaError=SimpleNamespace(success=0), cudaGetErrorString=str)
capture = threading.Thread(target=fake.fake_capture, args=(7, True)); capture.start(); capture.join()
pages = pinning.map_pages(2 << 20)
pinning.pin(pages, 0)
del pages
assert answers == [0, 0] and not fake.fake_spoilt()
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_a_graph_that_another_thread_captures_is_not_spoilt_by_pinning(tmp_path: Path) -> None:
    asked(build(tmp_path), PROGRAM)


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at ``ulimit -u`` or a cgroup's pids.max."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.usefixtures("no_threads")
def test_where_no_thread_can_be_started_pages_are_touched_by_who_asks() -> None:
    pages = map_pages(PAGE)
    pages[0] = 1
    touch(pages)
    assert pages[0] == 0


@pytest.mark.usefixtures("no_threads")
def test_where_no_thread_can_be_started_an_arena_grows() -> None:
    arena = DramArena(4 * PAGE, pinned=False, step=PAGE, idle_after=60)
    assert arena.allocate(PAGE) is not None
    arena.close()


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("status", [0, 2])
def test_where_no_thread_can_be_started_who_asks_pins(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    asked_by: list[threading.Thread] = []
    forgotten: list[bool] = []

    def register(address: int, nbytes: int, flags: int) -> int:
        asked_by.append(threading.current_thread())
        return status

    cudart = SimpleNamespace(
        cudaHostRegister=register,
        cudaHostUnregister=lambda address: 0,
        cudaError=SimpleNamespace(success=0),
        cudaGetErrorString=lambda status: "out of memory",
    )
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(pinning, "_beside_captures", nullcontext)
    monkeypatch.setattr(pinning, "_forget_error", lambda: forgotten.append(True))  # or a kernel would be blamed for it
    pages = map_pages(PAGE)
    with pytest.raises(PinningRefused, match="out of memory") if status else nullcontext():
        pin(pages, 0)
    assert (asked_by, forgotten) == ([threading.current_thread()], [True])
    del pages


def test_a_forked_child_does_not_unmap_what_lies_where_pages_were() -> None:
    """It has no such pages, and a large block of its own comes to lie there. It died when it let go of what it had."""
    program = """
import gc, os, sys
import numpy as np
from torch_tiers.allocator.host.pinning import map_pages
pages = map_pages(64 << 20)
child = os.fork()
if not child:
    own = [np.full(40 << 20, 7, np.uint8) for _ in range(4)]
    del pages; gc.collect()
    os._exit(not all((each == 7).all() for each in own))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0)
"""
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
