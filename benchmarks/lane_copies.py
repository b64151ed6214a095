"""How close do page groups on our lanes come to PyTorch's plain pinned copies, one direction and both at once?

``python -m benchmarks.lane_copies --json FILE`` takes about a minute on an H100.

Ours: groups between HBM and blocks of the arena, through the lanes that the engine uses. A group leaves as one piece or
as several, each a storage of its own in HBM: up to eight, as many as are of 2 MiB or of 64 KiB, or of mixed sizes. It
comes back in one copy, as the engine brings it. Plain: memory of ``torch.empty(pin_memory=True)`` and
``copy_(non_blocking=True)`` on a stream per direction, in whole groups; both ways at once also in chunks, and the
fastest of those is the base. All are queued behind a kernel and timed by events on the device, from the end of that
kernel to the end of the last copy. The GPU wrote what it gets back.

Prints speeds per direction (medians), the median ratio of speeds to plain with its 95% bootstrap interval, and last a
line for each demand. Exits with 1 if one is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, cycle, pairwise, takewhile
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.alternate import Ratio, median_ratio, self_timed, sm_clock
from torch_tiers.allocator.host.dram import DramArena
from torch_tiers.allocator.sizes import KiB, MiB, format_size
from torch_tiers.migrator.runtime.devices import Device, open_device
from torch_tiers.migrator.streams import Event, Lane
from torch_tiers.migrator.streams.pieces import Piece
from torch_tiers.migrator.telemetry.counters import Counters

SIZES = (4 * MiB, 16 * MiB, 64 * MiB, 256 * MiB)
PIECES, SMALLEST = 8, MiB  # a group of several leaves in so many pieces, of at least that
MIX = [size * KiB for size in (64, 3072, 512, 4096, 200, 1536, 2048, 1024)]  # in turn, until the group is full
CHUNKS = (4 * MiB, 16 * MiB)  # of plain copies both ways at once, besides whole groups
HOLD = 20_000_000  # cycles: 10 ms or more, in which the host asks for all copies of a window
DIRECTIONS = {"d2h": ("d2h",), "h2d": ("h2d",), "both": ("d2h", "h2d")}
WINDOW = 512 * MiB
"""Bytes that are queued together, on each lane: 10 ms, in which the two events around them do not count."""

LEAST = {"d2h": 0.98, "h2d": 0.98, "both": 0.95}  # of the plain speed
SPEED, FROM = 55, 16 * MiB  # GB/s one way, of groups of that size and more
ONE, SEVERAL, TWOS, SMALL, MIXED = (
    f"ours, {made_of}" for made_of in ("one piece", "several pieces", "2 MiB pieces", "64 KiB pieces", "mixed pieces")
)
SPLIT, PLAIN = (SEVERAL, TWOS, SMALL, MIXED), "plain"


class Memory:
    """For each lane its bytes on the host, and as many in HBM."""

    def __init__(self, host: dict[str, torch.Tensor], device: torch.device) -> None:
        self.host = host
        self.device = {lane: torch.empty_like(of_host, device=device) for lane, of_host in host.items()}
        self.device["d2h"].random_()
        self.host["h2d"].copy_(self.device["d2h"])

    def arrived(self, lane: str) -> bool:
        """Whether both sides are the same; what was written is spoiled for the next time."""
        same = torch.equal(self.host[lane].to(self.device[lane].device), self.device[lane])
        (self.host if lane == "d2h" else self.device)[lane].zero_()
        return same


def pieces_of(way: str, size: int) -> list[int]:
    """Bytes of each piece of a group of `size`, as it leaves in one of our ways."""
    part = {ONE: size, SEVERAL: max(size // PIECES, SMALLEST), TWOS: 2 * MiB, SMALL: 64 * KiB}.get(way)
    if part is not None:
        return [part] * (size // part)
    ends = takewhile(lambda end: end < size, accumulate(cycle(MIX)))
    return [end - begin for begin, end in pairwise([0, *ends, size])]


class Way(Protocol):
    """One way to copy groups between the two sides of `memory`."""

    memory: Memory

    def begin(self) -> Any:
        """The end of what the current stream was given so far."""

    def copy(self, lane: str, nbytes: int, size: int, start: Any) -> Any:
        """Ask for the first `nbytes` in groups of `size`, after `start`; the event says when all are there."""

    def end(self, events: Sequence[Any]) -> Any:
        """When all of `events` have been passed, as the current stream sees it."""

    def settle(self, start: Any) -> None:
        """All that was asked for is over."""


class Ours:
    """The engine's lanes, to and from the arena's memory."""

    def __init__(self, device: Device, memory: Memory, way: str) -> None:
        self.memory = memory
        self._compute = device.compute
        self._lanes: dict[str, Lane] = {"d2h": device.out, "h2d": device.back}
        self._way = way
        self._clones: dict[tuple[int, int], torch.UntypedStorage] = {}  # of the bytes from one place to another
        total = memory.device["d2h"].numel()
        places = [(size, at) for size in SIZES for at in range(0, total - size + 1, size)]
        self.groups = {
            "d2h": {place: list(self._leaving(*place)) for place in places},
            "h2d": {place: [self._coming(*place)] for place in places},
        }

    def begin(self) -> Event:
        return self._compute.mark(self._compute.stream())

    def copy(self, lane: str, nbytes: int, size: int, start: Event) -> Event:
        groups = self.groups[lane]
        return [self._lanes[lane].copy(groups[size, at], (start,)) for at in range(0, nbytes, size)][-1]

    def end(self, events: Sequence[Event]) -> Event:
        stream = self._compute.stream()
        for event in events:
            self._compute.wait(event, "end", stream)
        return self._compute.mark(stream)

    def settle(self, start: Event) -> None:
        for lane in self._lanes.values():
            lane.over(start)  # as every iteration: it times so many copies between two questions

    def _leaving(self, size: int, at: int) -> Iterator[Piece]:
        host, device = self.memory.host["d2h"], self.memory.device["d2h"]
        target, first = host.untyped_storage(), int(host.storage_offset())
        for nbytes in pieces_of(self._way, size):
            if self._way == ONE:
                yield Piece(target, first + at, device.untyped_storage(), at, nbytes)
            else:
                place = (at, at + nbytes)
                if place not in self._clones:
                    self._clones[place] = device[slice(*place)].clone().untyped_storage()
                yield Piece(target, first + at, self._clones[place], 0, nbytes)
            at += nbytes

    def _coming(self, size: int, at: int) -> Piece:
        host, device = self.memory.host["h2d"], self.memory.device["h2d"]
        return Piece(device.untyped_storage(), at, host.untyped_storage(), int(host.storage_offset()) + at, size)


class Plain:
    """PyTorch's copies on a stream per direction, in groups or in `chunk` bytes if that is less."""

    def __init__(self, memory: Memory, streams: dict[str, torch.cuda.Stream], chunk: int | None = None) -> None:
        self.memory = memory
        self._streams = streams
        self._chunk = chunk

    def begin(self) -> torch.cuda.Event:
        return _record(torch.cuda.current_stream())

    def copy(self, lane: str, nbytes: int, size: int, start: torch.cuda.Event) -> torch.cuda.Event:
        part = min(size, self._chunk or size)
        sides = (self.memory.host[lane][:nbytes].split(part), self.memory.device[lane][:nbytes].split(part))
        stream = self._streams[lane]
        stream.wait_event(start)
        with torch.cuda.stream(stream):
            for host, device in zip(*sides, strict=True):
                if lane == "d2h":
                    host.copy_(device, non_blocking=True)
                else:
                    device.copy_(host, non_blocking=True)
        return stream.record_event()  # which keeps no time, as ours

    def end(self, events: Sequence[torch.cuda.Event]) -> torch.cuda.Event:
        for event in events:
            torch.cuda.current_stream().wait_event(event)
        return _record(torch.cuda.current_stream())

    def settle(self, start: torch.cuda.Event) -> None:
        pass


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def seconds(way: Way, direction: str, size: int) -> float:
    """One window on the device, from the end of the kernel before it to the end of the last copy."""
    for patience in (1, 4, 16):
        torch.cuda.synchronize()
        torch.cuda._sleep(patience * HOLD)
        start = way.begin()
        ends = [way.copy(lane, WINDOW, size, start) for lane in DIRECTIONS[direction]]
        end = way.end(ends)
        in_time = not start.query()
        torch.cuda.synchronize()
        way.settle(start)
        if in_time:
            return float(start.elapsed_time(end)) / 1e3
    raise SystemExit("the kernel was over before the host had asked for all copies, three times: raise HOLD")


@dataclass(frozen=True)
class Row:
    """What one way reached; `of_plain` is the ratio of speeds, above 1 is faster than plain."""

    direction: str
    size: int
    way: str
    gigabytes_per_second: float
    of_plain: Ratio


def rows(direction: str, size: int, times: dict[str, list[float]]) -> list[Row]:
    """The rows of one size: the fastest of the plain ways, which all begin alike, is the base of all."""
    medians = {name: float(np.median(of_way)) for name, of_way in times.items()}
    base = min((name for name in times if name.startswith(PLAIN)), key=medians.__getitem__)
    nbytes = WINDOW * len(DIRECTIONS[direction])
    return [
        Row(direction, size, name, nbytes / medians[name] / 1e9, median_ratio(times[base], of_way))
        for name, of_way in times.items()
    ]


def demands(measured: Sequence[Row]) -> Iterator[tuple[bool, str]]:
    """Each demand: whether it holds, and the row that is nearest to missing it."""
    ours = [row for row in measured if not row.way.startswith(PLAIN)]
    for direction, least in LEAST.items():
        for way in (ONE, *SPLIT):
            of_way = [row for row in ours if (row.direction, row.way) == (direction, way)]
            if of_way:
                worst = min(of_way, key=lambda row: row.of_plain.median)
                text = f"{direction}, {way}: {worst.of_plain.median:.3f} of plain at {format_size(worst.size)}"
                yield worst.of_plain.median >= least, f"{text}, at least {least}"
    fast = [row for row in ours if row.direction != "both" and row.size >= FROM and row.way == ONE]
    slowest = min(fast, key=lambda row: row.gigabytes_per_second)
    text = f"{slowest.direction}, {slowest.gigabytes_per_second:.1f} GB/s at {format_size(slowest.size)}"
    yield slowest.gigabytes_per_second >= SPEED, f"{text}, at least {SPEED} from {format_size(FROM)} on"


def table(measured: Sequence[Row]) -> str:
    return "\n".join(
        f"{row.direction:5}{format_size(row.size):>10}  {row.way:22}{row.gigabytes_per_second:6.1f} GB/s"
        f"  of plain: {row.of_plain.median:.3f} ({row.of_plain.low:.3f} to {row.of_plain.high:.3f})"
        for row in measured
    )


def ways_on(device: torch.device) -> dict[str, dict[str, Way]]:
    """For each direction the ways by name."""
    arena = DramArena(2 * WINDOW, pinned=True, step=2 * WINDOW)
    blocks = {lane: arena.allocate(WINDOW) for lane in DIRECTIONS["both"]}
    if not arena.pinned:
        raise SystemExit("the arena's memory could not be pinned: nothing to compare")
    ours = Memory({lane: block.tensor for lane, block in blocks.items() if block is not None}, device)
    pinned = {lane: torch.empty(WINDOW, dtype=torch.uint8, pin_memory=True) for lane in blocks}
    streams = {lane: torch.cuda.Stream(device) for lane in blocks}
    plain = Memory(pinned, device)
    lanes = open_device(device, Counters(), 0)
    one = {ONE: Ours(lanes, ours, ONE)}
    split = {way: Ours(lanes, ours, way) for way in SPLIT}
    whole = {PLAIN: Plain(plain, streams)}
    chunked = {f"{PLAIN}, {format_size(chunk)} chunks": Plain(plain, streams, chunk) for chunk in CHUNKS}
    return {
        "d2h": {**whole, **one, **split},
        "h2d": {**whole, **one},
        "both": {**whole, **chunked, **one, **split},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU that torch can use: nothing to copy to")
    device = torch.device("cuda", torch.cuda.current_device())
    clocks, measured = [sm_clock()], []
    for direction, by_name in ways_on(device).items():
        for size in SIZES:
            timed = {name: partial(seconds, way, direction, size) for name, way in by_name.items()}
            measured += rows(direction, size, self_timed(timed, options.rounds))
        for way in by_name.values():
            seconds(way, direction, max(SIZES))
            if not all(way.memory.arrived(lane) for lane in DIRECTIONS[direction]):
                raise SystemExit(f"{direction}: what arrived is not what was sent")
        clocks.append(sm_clock())
    if options.json:
        facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "sm_clocks": clocks}
        kept = {**facts, "rounds": options.rounds, "rows": [asdict(row) for row in measured]}
        options.json.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"SM clock, MHz: {clocks}; {options.rounds} rounds")
    print(table(measured))
    judged = list(demands(measured))
    for holds, text in judged:
        print("PASS" if holds else "FAIL", text)
    sys.exit(not all(holds for holds, _ in judged))


if __name__ == "__main__":
    main()
