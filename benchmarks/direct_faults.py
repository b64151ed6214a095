"""What becomes of a run whose drive fails or lies, when moves go there by the direct path?

``python -m benchmarks.direct_faults`` prints a table as `benchmarks.faults` does, of a GPU if there is one.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Mapping

import torch

from benchmarks.faults import report
from benchmarks.kills import Row, lost_bytes
from tests.scenarios import bits, moved, moving, perceptron, train
from tests.scenarios.direct import directly
from tests.unit.store_faults import Fault, FaultyFile, fail, flip, short
from torch_tiers.allocator.errors import StoreError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REQUESTS = range(3, 60, 7)  # numbers of the reads, or of the writes, that fail


def program() -> list[bytes]:
    """Train for eight steps, the first of which are recorded for the plan. Return every loss and gradient, as bytes."""
    return bits(train(perceptron(DEVICE, depth=6), DEVICE, steps=8))


@functools.cache
def plain() -> list[bytes]:
    return program()


def row(
    name: str, reads: Mapping[int, Fault] | None = None, writes: Mapping[int, Fault] | None = None, twice: bool = False
) -> Row:
    opened: list[FaultyFile] = []
    expected = plain()
    lost, happened = 0, "equal results"
    with directly(DEVICE, opened, reads=reads, writes=writes, twice=twice) as arguments:
        with moving(**arguments) as session:
            try:
                lost = lost_bytes(program(), expected)
            except StoreError as error:
                happened = f"{type(error).__name__} out of backward"
            went = moved(session)["gds_write"]
        left = len(os.listdir(arguments["nvme_path"]))
    if not went:
        raise RuntimeError("nothing went to the drive directly")
    return Row(name, sum(file.met for file in opened), happened, lost, left)


def _each(fault: Fault) -> dict[int, Fault]:
    return dict.fromkeys(REQUESTS, fault)


def _always(fault: Fault) -> dict[int, Fault]:
    return dict.fromkeys(range(10_000), fault)


FAULTS: tuple[Callable[[], Row], ...] = (
    functools.partial(row, "nothing fails"),
    functools.partial(row, "EIO, also when tried again, on some writes", writes=_each(fail(errno.EIO)), twice=True),
    functools.partial(row, "ENOSPC on a write", writes={5: fail(errno.ENOSPC)}, twice=True),
    functools.partial(row, "EIO on some reads, not when tried again", reads=_each(fail(errno.EIO))),
    functools.partial(row, "EIO on every read", reads=_always(fail(errno.EIO))),
    functools.partial(row, "a transfer is short", reads=_each(short(5000)), writes=_each(short(64 * 1024))),
    functools.partial(row, "a bit flips in some reads, not when read again", reads=_each(flip(4321))),
    functools.partial(row, "a bit flips in every read", reads=_always(flip(4321))),
)


if __name__ == "__main__":
    report([fault() for fault in FAULTS])
