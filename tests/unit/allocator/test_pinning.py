"""Pinning against a driver that is none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.unit.fake_driver import asked, build

PROGRAM = """
import threading
from contextlib import nullcontext
from types import SimpleNamespace
import torch
from allocator import pinning
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
