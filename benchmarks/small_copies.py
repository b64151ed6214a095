"""How long a program's own small copies wait while a lane is busy in the same direction.

``python -m benchmarks.small_copies``. A lane's copies are given to the driver long before they are due. Whoever copies
a few bytes meanwhile, on a stream of its own, waits for some of them: a batch for the device, a loss that is read.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torch_tiers.allocator.sizes import GiB, MiB

LANE = 4 * GiB  # copied in each measurement
SMALL = 4096  # bytes of a program's copy
PAUSE = 0.5e-3  # seconds between two of them

Give = Callable[[list[Callable[[], None]]], "torch.cuda.Event"]


def queued(copies: list[Callable[[], None]]) -> torch.cuda.Event:
    """All on one stream, one after the other."""
    done = torch.cuda.Event()
    with torch.cuda.stream(torch.cuda.Stream()):
        for copy in copies:
            copy()
        done.record()
    return done


def on_streams_in_turn(copies: list[Callable[[], None]]) -> torch.cuda.Event:
    """On two streams in turn, each of which waits for the other's last: one alone has something to do."""
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    done = torch.cuda.Event()
    for number, copy in enumerate(copies):
        with torch.cuda.stream(streams[number % 2]):
            done.wait()
            copy()
            done = torch.cuda.Event()
            done.record()
    return done


WAYS: dict[str, Give] = {"queued": queued, "on streams in turn": on_streams_in_turn}


def measure(give: Give, piece: int, large: Sequence[Tensor], small: Sequence[Tensor]) -> tuple[float, list[float]]:
    """Bytes per second of the lane, and for how many seconds each small copy kept its stream; from one to the other."""
    source, target = large

    def copy(at: int) -> None:
        target[at : at + piece].copy_(source[at : at + piece], non_blocking=True)

    torch.cuda.synchronize()
    begin = time.perf_counter()
    done = give([lambda at=at: copy(at) for at in range(0, LANE, piece)])  # type: ignore[misc]
    waits = []
    while not done.query():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        small[1].copy_(small[0], non_blocking=True)
        end.record()
        end.synchronize()
        waits.append(start.elapsed_time(end) / 1e3)
        time.sleep(PAUSE)
    return LANE / (time.perf_counter() - begin), waits


def main() -> None:
    """Measure each way in both directions, and print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.small_copies")
    parser.add_argument("--pieces", nargs="+", type=int, default=[256, 32, 8], metavar="MIB")
    pieces = parser.parse_args().pieces
    large = torch.empty(LANE, dtype=torch.uint8).pin_memory(), torch.empty(LANE, dtype=torch.uint8, device="cuda")
    small = torch.empty(SMALL, dtype=torch.uint8).pin_memory(), torch.empty(SMALL, dtype=torch.uint8, device="cuda")
    print(torch.cuda.get_device_name())
    print("direction    way               MiB a piece   GB/s   small copies: median ms, most ms")
    for direction, order in (("to it", 1), ("from it", -1)):
        for way, give in WAYS.items():
            for piece in pieces:
                rate, waits = measure(give, piece * MiB, large[::order], small[::order])
                took = [1e3 * seconds for seconds in sorted(waits) or [0.0]]
                print(
                    f"{direction:12} {way:20} {piece:8} {rate / 1e9:6.1f} {took[len(took) // 2]:20.2f} {took[-1]:8.2f}"
                )


if __name__ == "__main__":
    main()
