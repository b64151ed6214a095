"""How long do a program's own small copies wait while a lane is busy in the same direction?

``python -m benchmarks.small_copies``. A lane's copies are given to the driver long before they are due. Whoever copies
a few bytes meanwhile, on a stream of its own, waits for some of them: a batch for the device, a loss that is read.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_tiers.allocator.native.copy import lane
from torch_tiers.allocator.sizes import GiB, MiB

LANE = 4 * GiB  # copied in each measurement
PIECE = 24 * MiB  # of a lane's copies: turns are not full
SMALL = 4096  # bytes of a program's copy
PAUSE = 0.5e-3  # seconds between two of them


class Queue:
    """All on one stream of PyTorch's."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        """The event says when it is done."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()


class Ours:
    """A lane, with turns of so many bytes."""

    def __init__(self, library: lane.Library, turn: int) -> None:
        self._library = library
        self._lane = library.open(torch.cuda.current_device(), turn)

    def copy(self, target: Tensor, source: Tensor) -> lane.Event:
        """The event says when it is done."""
        spans = array("Q", [target.data_ptr(), source.data_ptr(), target.nbytes])
        return self._library.copy(self._lane, spans, ())


def measure(way: Queue | Ours, large: Sequence[Tensor], small: Sequence[Tensor]) -> tuple[float, list[float]]:
    """Bytes per second of the lane, and how many seconds each small copy took meanwhile; from one to the other."""
    source, target = large
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for at in range(0, LANE, PIECE):
        done = way.copy(target[at : at + PIECE], source[at : at + PIECE])
    took = []
    while not done.query():
        asked = time.perf_counter()
        small[1].copy_(small[0], non_blocking=True)
        torch.cuda.current_stream().synchronize()
        took.append(time.perf_counter() - asked)
        time.sleep(PAUSE)
    return LANE / (time.perf_counter() - begin), took


def main() -> None:
    """Measure each way in both directions, and print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.small_copies")
    parser.add_argument("--turns", nargs="+", type=int, default=[64, 32, 16], metavar="MIB")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    library = lane.load()
    ways: dict[str, Queue | Ours] = {"PyTorch's stream": Queue()}
    ways["one of the driver's"] = Ours(library, LANE * options.rounds * 2)
    ways |= {f"turns of {turn} MiB": Ours(library, turn * MiB) for turn in options.turns}
    large = torch.empty(LANE, dtype=torch.uint8).pin_memory(), torch.empty(LANE, dtype=torch.uint8, device="cuda")
    small = torch.empty(SMALL, dtype=torch.uint8).pin_memory(), torch.empty(SMALL, dtype=torch.uint8, device="cuda")
    print(torch.cuda.get_device_name())
    print("direction  way                     GB/s   small copies: ms, median and most")
    for direction, order in (("to it", 1), ("from it", -1)):
        rates: dict[str, list[float]] = {way: [] for way in ways}
        waits: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way, copier in ways.items():
                rate, took = measure(copier, large[::order], small[::order])
                rates[way].append(rate)
                waits[way] += took
        for way, of_way in waits.items():
            rate, ms = statistics.median(rates[way]) / 1e9, [1e3 * seconds for seconds in of_way] or [0.0]
            print(f"{direction:10} {way:20} {rate:7.2f} {statistics.median(ms):14.2f} {max(ms):6.2f}")


if __name__ == "__main__":
    main()
