"""What becomes of a training run when its drive fails, lies, fills up or goes away, or when the run itself is killed?

``python -m benchmarks.faults --kills 50``

Every fault is injected into a run on the CPU, with little DRAM, so that much of what it saves goes to files. A byte is
lost if losses or gradients differ by a bit from those of the run without tiers and nobody raised an exception; a file
is left if anything can be found in the directory afterwards. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import errno
import functools
import logging
import os
import platform
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from benchmarks.kills import Row, kills, lost_bytes
from tests.scenarios import bits, moving, perceptron, train
from tests.unit.store_faults import Fault, FaultyFile, fail, short
from torch_tiers.allocator.errors import CorruptionError, StoreError
from torch_tiers.allocator.host.dram import DramArena
from torch_tiers.allocator.nvme import store
from torch_tiers.allocator.nvme.posix import PosixFile
from torch_tiers.allocator.sizes import MiB, format_size

CPU = torch.device("cpu")
DRAM, NVME = "20MiB", "64MiB"  # DRAM alone would just do, so that a drive that fails can be done without
SCARCE = "8MiB"  # of DRAM: most of the 18 MiB that a step saves must go to disk


Met = Callable[[], int]


class Skipped(Exception):
    """A fault cannot be injected here; the text says why."""


def program(steps: int = 3) -> list[bytes]:
    """Train a model that saves 18 MiB a step; every loss and gradient, as bytes."""
    model = perceptron(CPU, depth=8)
    return bits(train(model, CPU, steps=steps, loss_of=lambda model, x: model(x.repeat(2, 1)).square().mean()))


@functools.cache
def plain() -> list[bytes]:
    return program()


@contextmanager
def said() -> Iterator[list[str]]:
    """Collect what tiers warns of."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("tiers")
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


@contextmanager
def faulty(
    reads: Mapping[int, Fault] | None = None, writes: Mapping[int, Fault] | None = None, *, twice: bool = False
) -> Iterator[Met]:
    """Let stores that open inside meet these faults, by the number of the request; tells how many were met."""
    files: list[FaultyFile] = []

    def open_file(path: Path) -> FaultyFile:
        files.append(FaultyFile(PosixFile(path), reads=reads, writes=writes, twice=twice))
        return files[-1]

    with mock.patch.object(store, "choose_backend", lambda gds: open_file):
        yield lambda: sum(file.met for file in files)


def run(directory: str, dram: str = SCARCE) -> tuple[list[bytes], int]:
    """The program with its saved tensors in `directory`; its results, and how many bytes went to disk."""
    with moving(dram=dram, nvme=NVME, nvme_path=directory, nvme_gds="off") as session:
        return program(), session.stats()["moved"]["disk_write"]


def writes_that_fail(requests: range = range(3)) -> Row:
    lost = left = times = warned = 0
    for code in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
        for n in requests:
            faults = faulty(writes={n: fail(code)}, twice=True)
            with tempfile.TemporaryDirectory() as directory, said() as lines, faults as met:
                lost += lost_bytes(run(directory, DRAM)[0], plain())
                left += len(os.listdir(directory))
                times += met()
                warned += ["cannot write" in line for line in lines] == [True]
    happened = f"equal results; the group stayed in DRAM, said once in {warned} of them"
    return Row("EIO, also when tried again, ENOSPC or EDQUOT on the n-th write", times, happened, lost, left)


def reads_that_fail(requests: range = range(6)) -> Row:
    lost = left = times = raised = 0
    for n in requests:
        with tempfile.TemporaryDirectory() as directory, faulty(reads={n: fail(errno.EIO)}, twice=True) as met:
            try:
                lost += lost_bytes(run(directory)[0], plain())
            except StoreError as error:
                raised += error.action == "read" and error.path == directory
            left += len(os.listdir(directory))
            times += met()
    return Row(
        "EIO on the n-th read, also when tried again",
        times,
        f"StoreError out of backward in {raised} of them",
        lost,
        left,
    )


def transfers_that_stop(every: int = 3) -> Row:
    faults = [short(64 * 1024), short(5000), fail(errno.EINTR)]
    at = {n: faults[n // every % len(faults)] for n in range(0, 3000, every)}
    with tempfile.TemporaryDirectory() as directory, faulty(reads=at, writes=at) as met, said() as lines:
        lost = lost_bytes(run(directory)[0], plain())
        left = len(os.listdir(directory))
        times = met()
    return Row("a transfer is short or interrupted", times, f"equal results; {len(lines)} warnings", lost, left)


def bits_that_flip(count: int = 100, seed: int = 0) -> Row:
    """On the disk itself: the file is changed behind the store's back."""
    rng, found, lost = random.Random(seed), 0, 0
    files: list[PosixFile] = []

    def open_file(path: Path) -> PosixFile:
        files.append(PosixFile(path))
        return files[-1]

    with tempfile.TemporaryDirectory() as directory:
        nvme = store.NvmeStore([Path(directory)], 8 * MiB, gds="off", stripe=MiB, step=8 * MiB, backend=open_file)
        arena = store_arena(16 * MiB)
        written, back = arena[: 8 * MiB], arena[8 * MiB :]
        written.random_(generator=torch.Generator().manual_seed(seed))
        extent = nvme.allocate(8 * MiB)
        assert extent is not None
        for _ in range(count):
            nvme.write(extent, written).result()
            bit = rng.randrange(8 * 8 * MiB)
            flip_on_disk(files[0], bit)
            try:
                nvme.read(extent, back).result()
                lost += 1
            except CorruptionError as error:
                found += error.offset <= bit // 8 < error.offset + error.nbytes
        nvme.close()
        left = len(os.listdir(directory))
    return Row(
        "a bit flips on the disk", count, f"CorruptionError that names file and range, {found} times", lost, left
    )


def store_arena(nbytes: int) -> torch.Tensor:
    block = DramArena(nbytes, pinned=False, step=nbytes).allocate(nbytes)
    assert block is not None
    return block.tensor


def flip_on_disk(file: PosixFile, bit: int) -> None:
    with open(f"/proc/self/fd/{file.fileno()}", "r+b", buffering=0) as raw:
        raw.seek(bit // 8)
        (byte,) = raw.read(1)
        raw.seek(bit // 8)
        raw.write(bytes([byte ^ 1 << bit % 8]))
        os.fsync(raw.fileno())


def directory_that_is_removed(times: int = 3) -> Row:
    lost, expected = 0, plain()
    for _ in range(times):
        with tempfile.TemporaryDirectory() as parent:
            directory = Path(parent) / "drive"
            directory.mkdir()
            with moving(dram=SCARCE, nvme=NVME, nvme_path=str(directory), nvme_gds="off") as session:
                program(steps=1)
                assert session.stats()["moved"]["disk_write"] > 0
                directory.rmdir()
                lost += lost_bytes(program(), expected)
    return Row("the directory is removed while running", times, "equal results; the open file has no name", lost)


@contextmanager
def small_filesystem(kind: str, size: int) -> Iterator[str]:
    """Mount a filesystem of `size` bytes of its own. Skipped where that is not allowed."""
    with tempfile.TemporaryDirectory() as parent:
        point, image = Path(parent) / "mount", Path(parent) / "image"
        point.mkdir()
        if kind == "tmpfs":
            mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(point)]
        else:
            with open(image, "wb") as file:
                file.truncate(size)
            command("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image))
            mount = ["mount", "-o", "loop", str(image), str(point)]
        command(*mount)
        try:
            if (point / "lost+found").exists():
                (point / "lost+found").rmdir()
            yield str(point)
        finally:
            command("umount", str(point))


def command(*words: str) -> None:
    try:
        subprocess.run(words, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise Skipped(f"{words[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        raise Skipped(f"{words[0]}: {error.stderr.strip()}") from error


def filesystem_that_is_full(kind: str) -> Row:
    """It has room for less than the program has to put there; the arena has room for the rest."""
    size, expected = 4 * MiB if kind == "tmpfs" else 5 * MiB, plain()
    with small_filesystem(kind, size) as directory, said() as lines:
        with moving(dram="16MiB", nvme=NVME, nvme_path=directory, nvme_gds="off") as session:
            lost = lost_bytes(program(), expected)
            free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
            held = session.stats()["peak"]["nvme"]
        left = len(os.listdir(directory))
    told = sum("No space left" in line for line in lines)
    happened = f"equal results; {format_size(held)} used, {format_size(free)} left free, said {told} time(s)"
    return Row(f"a real {kind} of {format_size(size)} is full", 1, happened, lost, left)


def table(rows: list[Row]) -> Iterator[str]:
    yield "| fault | how often | what happened | bytes lost | files left |"
    yield "|---|---|---|---|---|"
    for row in rows:
        yield f"| {row.fault} | {row.times} | {row.happened} | {row.lost} | {row.left} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    faults: tuple[Callable[[], Row], ...] = (
        writes_that_fail,
        reads_that_fail,
        transfers_that_stop,
        bits_that_flip,
        directory_that_is_removed,
        functools.partial(filesystem_that_is_full, "ext4"),
        functools.partial(filesystem_that_is_full, "tmpfs"),
        functools.partial(kills, options.kills, options.seed),
    )
    rows, skipped = [], []
    for fault in faults:
        try:
            rows.append(fault())
        except Skipped as reason:
            skipped.append(f"Left out: {reason}.")
    report(rows, skipped)


def report(rows: list[Row], skipped: Sequence[str] = ()) -> None:
    """Print the table; exit with 1 if anything was lost or left."""
    print(f"Python {platform.python_version()}, PyTorch {torch.__version__}, Linux {platform.release()}.\n")
    print("\n".join([*table(rows), *skipped]))
    if any(row.lost or row.left for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
