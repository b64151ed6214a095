"""A store, and a program that trains, on a drive that misbehaves below it: between the C library and the kernel."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]

STORE = """
import ctypes, json, logging, os, sys, tempfile
from pathlib import Path
import torch
from torch_tiers.allocator.host.dram import DramArena
from torch_tiers.allocator.errors import StoreError
from torch_tiers.allocator.nvme import watch
from torch_tiers.allocator.nvme.store import NvmeStore

KiB = 1 << 10
watch.PATIENCE, watch._LOOK = 0.5, 0.1
arena = DramArena(4 << 20, pinned=False, step=2 << 20)
written, back = arena.allocate(128 * KiB).tensor, arena.allocate(128 * KiB).tensor
written.random_(generator=torch.manual_seed(0))

def open_store():
    directory = Path(tempfile.mkdtemp(dir=sys.argv[1]))
    return NvmeStore([directory], 1 << 20, gds="off", stripe=64 * KiB, step=1 << 20, depth=1)

def use(store):
    for _ in range(5):
        extent = store.allocate(128 * KiB)  # none is freed, as one that a program holds
        if extent is None:
            yield "none left"
            return
        try:
            store.write(extent, written).result()
            store.read(extent, back.zero_()).result()
            yield "right" if torch.equal(written, back) else "WRONG"
        except StoreError as error:
            yield type(error).__name__

print("ready", flush=True)
"""

USED = (
    STORE
    + """
list(use(open_store()))
"""
)

ANSWERING = (
    STORE
    + """
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("tiers").addHandler(handler)
for case in sys.stdin:
    os.environ.update(json.loads(case))
    ctypes.CDLL(os.environ["LD_PRELOAD"]).shim_reset()
    said.clear()
    store = open_store()
    happened = list(use(store))
    store.close()
    print(json.dumps([happened, said]), flush=True)
"""
)

LEFT_OPEN = (
    STORE
    + """
store = open_store()
store.write(store.allocate(128 * KiB), written)
while not store.stuck:
    pass
"""
)

TRAINING = """
import sys
import torch
from tests.scenarios import moving
from tests.scenarios.disk import _program
from torch_tiers.allocator.nvme import watch

watch.PATIENCE, watch._LOOK = 0.5, 0.1
with moving(dram="8MiB", nvme="64MiB", nvme_path=sys.argv[1], nvme_gds="off"):
    print("ready", flush=True)
    _program(torch.device("cpu"))
"""


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("shim") / "io_shim.so"
    source = ROOT / "tests/unit/io_shim.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", library, source], check=True)
    return library


def start(shim: Path, directory: Path, program: str, fault: str = "", after: int = 0) -> subprocess.Popen[str]:
    """Start a program on a directory of a drive with a fault, and wait until it is ready."""
    spill = directory / "spill"
    spill.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(spill)],
        env={**os.environ, "LD_PRELOAD": str(shim), "SHIM_FAULT": fault, "SHIM_AFTER": str(after)},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


Meet = Callable[..., tuple[list[str], list[str]]]


@pytest.fixture(scope="module")
def meet(shim: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Meet]:
    """Let a new store meet a fault: what becomes of five extents of two requests each, and what is warned of."""
    process = start(shim, tmp_path_factory.mktemp("drive"), ANSWERING)
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def ask(fault: str, after: int = 0, every: int = 1, seconds: int = 0) -> tuple[list[str], list[str]]:
        settings = {"fault": fault, "after": after, "every": every, "seconds": seconds}
        stdin.write(json.dumps({f"SHIM_{name.upper()}": str(value) for name, value in settings.items()}) + "\n")
        stdin.flush()
        happened, said = json.loads(stdout.readline())
        return happened, said

    yield ask
    process.communicate(timeout=60)


@pytest.mark.parametrize("fault", ["failed write", "failed read", "flipped read", "again", "interrupted"])
def test_what_goes_wrong_once_is_tried_again_and_comes_right(meet: Meet, fault: str) -> None:
    happened, said = meet(fault, every=3)  # requests: the second stripe may be read before the first again
    assert happened == ["right"] * 5
    assert ["all was well when it was read again" in line for line in said] == [True] * (fault == "flipped read")


def test_short_transfers_go_on(meet: Meet) -> None:
    assert meet("short") == (["right"] * 5, [])


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("lost write", "CorruptionError"),
        ("misdirected write", "CorruptionError"),
        ("flipped read", "CorruptionError"),
        ("empty read", "StoreError"),
        ("failed read", "StoreError"),
    ],
)
def test_what_does_not_come_back_as_it_was_is_an_error(meet: Meet, fault: str, error: str) -> None:
    assert meet(fault)[0] == [error] * 5


def test_a_directory_is_given_up_after_three_writes_in_a_row_that_fail(meet: Meet) -> None:
    happened, said = meet("failed write")
    assert happened == ["StoreError"] * 3 + ["none left"]
    first, last = said
    assert "stays in use unless 3 writes in a row fail; look at dmesg" in first
    assert "takes no more data" in last


def test_a_drive_that_puts_off_all_writes_is_given_up_as_one_that_fails(meet: Meet) -> None:
    assert meet("again")[0] == ["StoreError"] * 3 + ["none left"]


def test_a_full_disk_is_given_up_at_once(meet: Meet) -> None:
    happened, said = meet("full", after=2)
    assert happened == ["right", "StoreError", "none left"]
    assert ["No space left on device" in line and "takes no more data" in line for line in said] == [True]


@pytest.mark.parametrize("direction", ["write", "read"])
def test_a_drive_that_takes_long_is_told_once_and_waited_for(meet: Meet, direction: str) -> None:
    happened, said = meet(f"slow {direction}", seconds=1, after=8)
    assert happened == ["right"] * 5
    assert [f"does not answer: a {direction} of 64.0 KiB, begun 1 s ago" in line for line in said] == [True]
    assert "/spill/" in said[0]


@pytest.mark.parametrize("program", [USED, TRAINING], ids=["store", "training"])
@pytest.mark.parametrize("direction", ["write", "read"])
def test_ctrl_c_ends_a_program_whose_drive_does_not_answer(
    shim: Path, tmp_path: Path, direction: str, program: str
) -> None:
    process = start(shim, tmp_path, program, f"hanging {direction}")
    try:
        assert process.stderr is not None
        assert f"does not answer: a {direction}" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    assert "does not answer" not in err  # again
    assert process.returncode == -signal.SIGINT
    assert time.monotonic() - begin < 10


def test_a_program_that_ends_does_not_wait_for_a_drive_that_does_not_answer(shim: Path, tmp_path: Path) -> None:
    process = start(shim, tmp_path, LEFT_OPEN, "hanging write")
    try:
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0
    assert err.count("does not answer: a write") == err.count("\n") == 1
