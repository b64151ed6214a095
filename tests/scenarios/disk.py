"""The path past DRAM: what does not fit goes to a file, which may be full, fail or be left by a SIGKILL."""

from __future__ import annotations

import errno
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.scenarios import assert_same, main, moved, moving, perceptron, train
from tests.unit.store_faults import FaultyFile, fail, flip
from torch_tiers.allocator.errors import StoreError
from torch_tiers.allocator.nvme import store
from torch_tiers.allocator.nvme.posix import PosixFile
from torch_tiers.allocator.sizes import MiB


def _program(device: torch.device, *, depth: int = 8, steps: int = 4) -> list[Tensor]:
    """Save `depth` storages of 2 MiB, each a group, a step."""
    model = perceptron(device, depth=depth)
    return train(model, device, steps=steps, loss_of=lambda model, x: model(x.repeat(2, 1)).square().mean())


@contextmanager
def _directory() -> Iterator[dict[str, Any]]:
    """Yield the arguments of a session with little DRAM and a directory, in which nothing may be left."""
    with tempfile.TemporaryDirectory() as directory:
        yield {"dram": "8MiB", "nvme": "64MiB", "nvme_path": directory, "nvme_gds": "off"}
        assert os.listdir(directory) == []


@contextmanager
def _said(text: str, times: int) -> Iterator[None]:
    """Check how often a warning of ours is said."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("tiers").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("tiers").removeHandler(handler)
    for line in lines:
        print(f"  said: {line}")
    assert sum(text in line for line in lines) == times


def _faulty(**faults: Any) -> Any:
    """Let stores that open from now on meet faults."""
    return mock.patch.object(store, "choose_backend", lambda gds: lambda path: FaultyFile(PosixFile(path), **faults))


def what_dram_does_not_hold_goes_through_the_file(device: torch.device) -> None:
    with _directory() as arguments:
        stats = assert_same(_program, device, **arguments)
    assert stats["moved"]["disk_write"] > 0
    assert stats["moved"]["disk_read"] > 0
    assert 0 < stats["peak"]["dram"] <= 8 * MiB
    assert 0 < stats["peak"]["nvme"] <= 64 * MiB


def a_disk_that_is_full_leaves_the_rest_to_dram(device: torch.device) -> None:
    """A step saves 18 MiB; the file, which was promised 64 MiB, cannot grow past 4."""
    with _directory() as arguments, _faulty(full_at=4 * MiB), _said("No space left on device", times=1):
        stats = assert_same(_program, device, **{**arguments, "dram": "16MiB"})
    assert stats["peak"]["nvme"] == 4 * MiB


def what_fits_nowhere_stays_in_hbm(device: torch.device) -> None:
    """Training goes on; a warning names tier, path and sizes, once."""
    with _directory() as arguments, _said(f"tier dram and nvme at {arguments['nvme_path']} is full", times=1):
        assert_same(partial(_program, depth=16, steps=6), device, **{**arguments, "dram": "4MiB", "nvme": "4MiB"})


def a_disk_that_fails_to_write(device: torch.device) -> None:
    """What was not written is still in DRAM; the directory is out of rotation at the third failure, said once."""
    every = {n: fail(errno.EIO) for n in range(1, 1000)}
    with _directory() as arguments, _faulty(writes=every), _said("takes no more data", times=1):
        assert_same(_program, device, **{**arguments, "dram": "20MiB", "tier": "nvme"})


def one_write_that_fails(device: torch.device) -> None:
    with _directory() as arguments, _faulty(writes={3: fail(errno.EIO)}, twice=True), _said("nput/output", times=1):
        assert_same(_program, device, **{**arguments, "dram": "20MiB", "tier": "nvme"})


def a_disk_that_fails_to_read(device: torch.device) -> None:
    """An exception out of backward, and not the zeros of a buffer that nobody filled."""
    every = {n: fail(errno.EIO) for n in range(1000)}
    with _directory() as arguments, _faulty(reads=every), moving(**arguments), pytest.raises(StoreError) as caught:
        _program(device)
    print(f"  {caught.value}")
    assert caught.value.action == "read"
    assert str(arguments["nvme_path"]) in caught.value.path


def a_bit_that_flips_on_the_disk(device: torch.device) -> None:
    with _directory() as arguments, _faulty(reads={2: flip(1234)}, twice=True), moving(**arguments):
        with pytest.raises(StoreError, match="checksum"):
            _program(device)
        print("  and training goes on")
        _program(device)


def _limited(device: torch.device) -> None:
    """Train where no file may grow past 6 MiB, whatever the store was promised."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6 * MiB, 6 * MiB))
    with _directory() as arguments:
        assert_same(_program, device, **{**arguments, "dram": "20MiB", "tier": "nvme"})


def a_limit_on_the_size_of_files(device: torch.device) -> None:
    done = _python("disk._limited", device)
    output = done.communicate(timeout=100)[0]
    print(output)
    assert done.returncode == 0


def _endless(device: torch.device, directory: str) -> None:
    with moving(dram="8MiB", nvme="64MiB", nvme_path=directory, nvme_gds="off") as session:
        while True:
            _program(device, steps=1)
            print(moved(session)["disk_read"], flush=True)


def killed_with_sigkill(device: torch.device) -> None:
    """Nothing is left in the directory, and the space is free again."""
    with tempfile.TemporaryDirectory() as directory:
        process = _python("disk._endless", device, directory)
        assert process.stdout is not None
        while (line := process.stdout.readline().strip()) in ("", "0") or not line.isdigit():  # it warns there, too
            assert process.poll() is None
        used = _blocks_used(directory)
        assert os.listdir(directory) == []  # the file has no name from the start
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        assert os.listdir(directory) == []
        _wait_until(lambda: _blocks_used(directory) < used)


def _blocks_used(directory: str) -> int:
    status = os.statvfs(directory)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def _wait_until(condition: Callable[[], bool]) -> None:
    """Wait half a minute at most."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _python(function: str, device: torch.device, *arguments: str) -> subprocess.Popen[str]:
    module, name = function.split(".")
    code = f"import sys, torch; from tests.scenarios import {module}; "
    code += f"{module}.{name}(torch.device({str(device)!r}), *sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


if __name__ == "__main__":
    main("disk")
