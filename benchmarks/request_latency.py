"""How long does the allocator's core take for one request and for one free, served from what is mapped, without a GPU?

``python -m benchmarks.request_latency``

Real training steps (`tests/data/sequences`) through the library's C interface, in the periods after the second, laid
out and by best fit. Called in a row, the core finds its data in the CPU's caches; "disturbed" is with 4 MiB of other
memory touched before each call, as a program's own work between two requests would.
"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torch_tiers.allocator import native
from torch_tiers.allocator.layout.sequence import Log, predict
from torch_tiers.allocator.native.sequence_layout import SequenceLayout
from torch_tiers.allocator.sizes import MiB

ROOT = Path(__file__).parents[1]
SEQUENCES = ROOT / "tests" / "data" / "sequences"
DISTURBANCE = 4 * MiB
COMPILER = shutil.which("g++") or shutil.which("clang++")


@dataclass(frozen=True, slots=True)
class Times:
    """Nanoseconds of a call, without the clock's own."""

    calls: int
    p50: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True)
class Latency:
    """What one sequence took; `clock` is the nanoseconds that were taken off every time.

    `planned` of the requests were served where the layout has them, and `maps` pages were mapped meanwhile.
    """

    allocate: Times
    free: Times
    clock: float
    planned: int
    maps: int


def build(folder: Path) -> Path:
    """Compile the program that calls and times, against the library that runs."""
    program = folder / "request_latency"
    source = Path(__file__).with_suffix(".cpp")
    include, library = native.LIBRARY.parent, native.LIBRARY
    command = [str(COMPILER), "-std=c++17", "-O2", f"-I{include}", str(source), str(library), f"-Wl,-rpath,{include}"]
    subprocess.run([*command, "-o", str(program)], check=True)
    return program


def measure(program: Path, sequence: str, *, laid_out: bool, periods: int = 20, disturbance: int = 0) -> Latency:
    """Time `periods` periods of a sequence, once it is settled."""
    data = _read(sequence)
    events = [(int(event[1]), int(event[2]) if event[0] == "a" else 0) for event in data["events"]]
    numbers = [len(data["live_at_start"]), *(nbytes for _, nbytes in data["live_at_start"])]
    numbers += [len(events), *(number for event in events for number in event)]
    numbers += _layout(events) if laid_out else [0, 0]
    done = subprocess.run(
        [str(program), str(periods), str(disturbance)],
        input=" ".join(map(str, numbers)),
        capture_output=True,
        text=True,
        check=True,
    )
    seen = json.loads(done.stdout)
    clock = seen["clock"]["p50"]
    times = {}
    for call in ("allocate", "free"):
        of = seen[call]
        times[call] = Times(of["calls"], *(max(0.0, of[name] - clock) for name in ("p50", "p99", "most")))
    return Latency(times["allocate"], times["free"], clock, seen["planned"], seen["maps"])


def _layout(events: list[tuple[int, int]]) -> list[int]:
    """The layout that the allocator makes of the period, as numbers for the program."""
    births = {block: at for at, (block, nbytes) in enumerate(events) if nbytes}
    deaths = {block: at for at, (block, nbytes) in enumerate(events) if not nbytes}
    sizes = (-(-nbytes // 512) * 512 for _, nbytes in events if nbytes)
    rows = [(size, 0, births[block], deaths[block], 0) for size, block in zip(sizes, births, strict=True)]
    predicted = predict(Log(np.array(rows, native.REQUEST), len(events)))
    assert isinstance(predicted, SequenceLayout)
    requests = zip(predicted.sizes.tolist(), predicted.offsets.tolist(), strict=True)
    costs = predicted.costs.tolist()
    return [len(predicted.sizes), *(number for request in requests for number in request), len(costs), *costs]


def whole_steps() -> list[str]:
    """Names of the sequences that are steps; another, of packing alone, holds lifetimes without their events."""
    names = sorted(path.name.removesuffix(".json.gz") for path in SEQUENCES.glob("*.json.gz"))
    return [name for name in names if "live_at_start" in _read(name)]


def _read(sequence: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(gzip.decompress((SEQUENCES / f"{sequence}.json.gz").read_bytes()))
    return data


def main() -> None:
    """Run from the command line."""
    print("| sequence | served | caches | request p50 | p99 | free p50 | p99 |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for name in whole_steps():
            for laid_out in (True, False):
                for disturbance, periods in ((0, 20), (DISTURBANCE, 2)):
                    seen = measure(program, name, laid_out=laid_out, periods=periods, disturbance=disturbance)
                    served = "where laid out" if laid_out else "best fit"
                    caches = "disturbed" if disturbance else "its own"
                    times = (seen.allocate.p50, seen.allocate.p99, seen.free.p50, seen.free.p99)
                    cells = " | ".join(f"{time / 1000:.2f} us" for time in times)
                    print(f"| {name} | {served} | {caches} | {cells} |", flush=True)
    print(f"\nThe clock's own {seen.clock:.0f} ns are taken off.")


if __name__ == "__main__":
    main()
