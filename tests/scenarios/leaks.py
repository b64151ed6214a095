"""Many steps leave nothing: arenas empty, file descriptors, threads and memory where they were after a warm-up."""

from __future__ import annotations

import ctypes
import gc
import os
import tempfile
import threading
import time

import psutil
import torch
from torch import nn

from tests.scenarios import batch, main, moved, moving, perceptron
from torch_tiers.allocator.sizes import MiB

WARM_UP = 150  # steps: until caches of PyTorch's, of Python's and of the C library have their size
LOOKS = 5
GROWTH = 4 * MiB  # of resident memory that is noise: a leak of one small tensor a step is seen


def _steps(model: nn.Module, device: torch.device, count: int) -> None:
    """Train, with now and then a step that ends otherwise."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for i in range(count):
        optimizer.zero_grad()
        loss = model(batch(device, i, rows=2048 - i % 3)).square().mean()
        if i % 10 == 3:
            continue  # dropped
        loss.backward(retain_graph=i % 10 == 5)
        if i % 10 == 5:
            loss.backward()
        optimizer.step()
        if i % 10 == 7:
            model(batch(device, i)).mean()  # evaluation that forgot no_grad
    del loss


def _counts() -> dict[str, int]:
    # The pools for the disk hold few threads and start the last of them when all are first busy, be that in the
    # warm-up or after it.
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith("tiers-disk-")]
    return {"files": _files(), "threads": len(threads)}


def _files() -> int:
    """How many are open: not those that a thread has for a moment, as one does that looks at the host's memory."""
    looks = []
    for _ in range(LOOKS):
        looks.append(len(os.listdir("/proc/self/fd")))
        time.sleep(0.01)
    return min(looks)


def _resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free counts as free, wherever in the C library's heap it lies
    return psutil.Process().memory_info().rss


def leave_nothing(device: torch.device, steps: int = 100) -> None:
    with tempfile.TemporaryDirectory() as directory:
        disk = {"dram": "6MiB", "nvme": "64MiB", "nvme_path": directory, "nvme_gds": "off"}
        with moving(room=0, **disk) as session:
            model = perceptron(device)
            _steps(model, device, WARM_UP)
            before, resident = _counts(), _resident()
            on_gpu = torch.cuda.memory_allocated() if device.type == "cuda" else 0
            _steps(model, device, steps)
            after, growth = _counts(), _resident() - resident
            print(f"  {before} before, {after} after {steps} steps; resident memory grew by {growth / MiB:.1f} MiB")
            print(f"  moved {moved(session)}, peak {session.stats()['peak']}")
            assert moved(session)["disk_read"] > 0
            assert all(after[what] <= before[what] for what in before)  # the collector may close what others left
            assert growth < GROWTH
            assert on_gpu == (torch.cuda.memory_allocated() if device.type == "cuda" else 0)
            dram, nvme = session._dram, session._nvme
        assert dram is not None
        assert nvme is not None
        assert (dram.used, nvme.used) == (0, 0)


if __name__ == "__main__":
    main("leaks")
