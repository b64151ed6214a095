"""The way to NVMe past host memory: what is trained through it is what plain PyTorch trains.

Without a GPU host memory plays HBM, and the file is a plain one. On a GPU requests go through cuFile, whose own
compatibility mode serves where the hardware cannot (``CUFILE_ALLOW_COMPAT_MODE``), or through kvikio's
(``KVIKIO_COMPAT_MODE=ON``), which also serves where cuFile takes no file of this machine.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.programs import deterministic_kernels
from tests.scenarios import Program, assert_same, batch, bits, gradients, main, moved, moving, perceptron, train
from tests.unit.store_faults import FaultyFile, fail, flip
from torch_tiers.allocator.errors import StoreError
from torch_tiers.allocator.nvme import cufile, store
from torch_tiers.allocator.nvme.backend import Backend
from torch_tiers.allocator.nvme.kvikio import KvikioFile
from torch_tiers.allocator.nvme.posix import PosixFile
from torch_tiers.allocator.nvme.ring import Ring
from torch_tiers.allocator.sizes import KiB
from torch_tiers.assembly import Session
from torch_tiers.drives import Drives
from torch_tiers.migrator.offload.direct import DirectWay

_SLOT, _SLOTS = 256 * KiB, 3  # a layer of the programs here saves four slots


def _cufile_takes_files() -> bool:
    if os.environ.get("KVIKIO_COMPAT_MODE", "").upper() == "ON":
        return False
    try:
        with tempfile.TemporaryDirectory() as directory:
            KvikioFile(Path(directory), mode="gds").close()
    except StoreError:
        return False
    return True


@contextmanager
def directly(device: torch.device, opened: list[FaultyFile] | None = None, **faults: Any) -> Iterator[dict[str, Any]]:
    """Yield the arguments of a session in which all that moves goes to a file directly.

    The files that are `opened` are kept there.
    """
    by_cufile = device.type == "cuda" and _cufile_takes_files()

    def open_file(path: Any) -> Backend:
        on_gpu = device.type == "cuda"
        file = KvikioFile(path, mode="gds" if by_cufile else "compat") if on_gpu else PosixFile(path)
        faulty = FaultyFile(file, **faults)
        if opened is not None:
            opened.append(faulty)
        return faulty

    def ring(device: torch.device) -> Ring:
        register = (cufile.register, cufile.deregister) if by_cufile else (None, None)
        return Ring(device, _SLOTS, _SLOT, *register)

    def way(self: Drives, device: torch.device) -> DirectWay:
        return DirectWay(self.store, ring(device), ring(device))

    with (
        tempfile.TemporaryDirectory() as directory,
        mock.patch.object(store, "choose_backend", lambda gds: open_file),
        mock.patch.object(Drives, "direct_way", way),
    ):
        yield {"tier": "nvme", "dram": "8MiB", "nvme": "256MiB", "nvme_path": directory, "nvme_gds": "off"}
        assert os.listdir(directory) == []


def _assert_same_directly(program: Program, device: torch.device, **arguments: Any) -> dict[str, Any]:
    """Check that a program yields what it yields without tiers, and that the direct lanes moved bytes both ways."""
    stats = assert_same(program, device, moves=False, **arguments)
    assert stats["moved"]["gds_write"] > 0 and stats["moved"]["gds_read"] > 0, "the direct lanes were not tested"
    return stats


def _six_layers(device: torch.device) -> list[Tensor]:
    return train(perceptron(device, depth=6), device, steps=8)


def everything_goes_past_host_memory(device: torch.device) -> None:
    with directly(device) as arguments:
        stats = _assert_same_directly(_six_layers, device, **arguments)
    assert stats["peak"]["nvme"] > 0
    settled = stats["settled"]["moved"]
    assert settled["gds_write"] > 0 and settled["d2h"] == settled["disk_write"] == 0


def flashneuron_leaves_dram_alone(device: torch.device) -> None:
    """As in its paper: from HBM to the drive and back, from the first step on that a plan is for.

    On a GPU a budget holds what libraries take, too, and what PyTorch's allocator reserves beyond what it hands out, so
    that the model is larger there: it saves 4 MiB a layer. No step's results stay in GPU memory: the plan is for what
    the steps before it needed.
    """
    on_gpu = device.type == "cuda"
    depth, repeated = (160, 4) if on_gpu else (6, 1)
    session: Session | None = None
    counted: list[dict[str, int]] = []  # as each step begins; how many of them learn is not the same everywhere

    def program() -> list[bytes]:
        model = perceptron(device, width=64, depth=depth)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        results = []
        for i in range(12):
            if session is not None:
                counted.append(session.stats()["moved"])
            loss = model(batch(device, i).view(-1, 64).repeat(repeated, 1)).square().mean()
            loss.backward()
            results += bits([loss, *gradients(model)])
            optimizer.step()
            optimizer.zero_grad()
        return results

    with deterministic_kernels(), directly(device) as arguments:
        arguments |= {"tier": None, "policy": "flashneuron", "hbm": "480MiB" if on_gpu else "4MiB"}
        if on_gpu:  # the first steps, of which there is no plan yet, leave all that they save to DRAM
            arguments |= {"dram": "1GiB", "nvme": "1GiB"}
        plain = program()
        with moving(**arguments) as session:
            assert program() == plain
    first = next((step for step, so_far in enumerate(counted) if so_far["gds_write"]), len(counted) - 1)
    planned = {lane: counted[-1][lane] - counted[first][lane] for lane in counted[-1]}
    print(f"  moved {counted[first]} in {first} steps, and {planned} in the {len(counted) - 1 - first} after these")
    assert planned["gds_write"] > 0 and planned["gds_read"] > 0, "the direct lanes were not tested"
    assert planned["d2h"] == planned["h2d"] == 0


def a_network_with_tensors_of_all_sizes(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(128, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 128)) for _ in range(4)]
        return train(nn.Sequential(*layers).to(device), device, steps=6)

    with directly(device) as arguments:
        _assert_same_directly(program, device, **arguments)


def a_graph_that_is_used_twice(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model, results = perceptron(device), []
        for i in range(10):  # the direct lanes have something to do once there is a plan
            loss = model(batch(device, i)).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            results += gradients(model)
            model.zero_grad()
        return results

    with directly(device) as arguments:
        _assert_same_directly(program, device, **arguments)


def a_graph_that_is_dropped_half_way(device: torch.device) -> None:
    with directly(device) as arguments, moving(**arguments) as session:
        model = perceptron(device, depth=8)
        for i in range(10):
            loss = model(batch(device, i)).square().mean()
            if i < 6 or i % 2:
                loss.backward()
            del loss
        assert moved(session)["gds_write"] > 0 and moved(session)["gds_read"] > 0


def a_drive_that_fails_to_write(device: torch.device) -> None:
    with directly(device, writes={n: fail(errno.EIO) for n in range(3, 60, 7)}, twice=True) as arguments:
        _assert_same_directly(_six_layers, device, **arguments)


def a_drive_that_gives_back_other_bytes(device: torch.device) -> None:
    """Once is read again; always ends training instead of going on with them."""
    with directly(device, reads={n: flip(0) for n in range(10_000)}) as arguments:
        arguments |= {"dram": "32MiB"}  # which holds the first steps, so that the first read is a direct one
        with moving(**arguments) as session:
            with pytest.raises(StoreError, match="checksum"):
                _six_layers(device)
            assert moved(session)["gds_write"] > 0 and moved(session)["disk_write"] == 0


if __name__ == "__main__":
    main("direct")
