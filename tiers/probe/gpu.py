"""The link between a GPU and host memory: the runtime's lanes and arena, and plain copies as a reference."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Literal, Protocol, cast

import torch

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.host.dram import DramBlock
from torch_tiers.migrator.runtime.devices import open_device
from torch_tiers.migrator.streams import Event, Stream
from torch_tiers.migrator.streams.cuda import wrapped
from torch_tiers.migrator.streams.pieces import Piece, flat, whole
from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.probe.affinity import Node
from torch_tiers.probe.host import HostMemory
from torch_tiers.probe.measure import Run, copies, window
from torch_tiers.probe.pattern import fill, matches
from torch_tiers.probe.results import Path

Direction = Literal["d2h", "h2d"]

_HOLD = 8_000_000  # cycles: 4 ms or more
_LONGEST_HOLD = 64 * _HOLD


def cuda_refusal() -> str | None:
    """Say why no GPU can be used, or return None."""
    return None if torch.cuda.is_available() else "no CUDA device"


class Copier(Protocol):
    """Copies in one direction, on a stream of its own."""

    def copy(self, pieces: Sequence[Piece], behind: Stream) -> Event:
        """Copy, but not before all that `behind` was given so far, if that is given; the event says when it is done."""

    def hold(self, event: Event) -> None:
        """Let the current stream go on only after `event`."""

    def close(self) -> None:
        """Wait for what was submitted."""


class PlainStream:
    """A stream with nothing of ours around it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, pieces: Sequence[Piece], behind: Stream) -> torch.cuda.Event:
        """Queue plain copies."""
        with torch.cuda.stream(self._stream):
            if behind is not None:
                self._stream.wait_stream(wrapped(behind))
            for target, at, source, start, nbytes in pieces:
                flat(target, at, nbytes).copy_(flat(source, start, nbytes), non_blocking=True)
            done = torch.cuda.Event(enable_timing=True)
            done.record(self._stream)
        return done

    def hold(self, event: Event) -> None:  # noqa: D102
        torch.cuda.current_stream(self._device).wait_event(cast("torch.cuda.Event", event))

    def close(self) -> None:
        """Wait for what was queued."""
        self._stream.synchronize()


class RuntimeLane:
    """A lane as a run has it."""

    def __init__(self, device: torch.device, direction: Direction) -> None:
        opened = open_device(device, Counters(), 0)
        self._compute = opened.compute
        self._compute.time_waits(0)  # so that `wait` is nothing but a wait
        self._lane = opened.out if direction == "d2h" else opened.back

    def copy(self, pieces: Sequence[Piece], behind: Stream = None) -> Event:  # noqa: D102
        return self._lane.copy(pieces, (), behind)

    def hold(self, event: Event) -> None:  # noqa: D102
        self._compute.wait(event, "copy", self._compute.stream())

    def close(self) -> None:
        """Wait for what was submitted."""
        self._lane.close()


class HbmDramPath:
    """Copies between a GPU and a NUMA node, in one direction or in both at once.

    Parameters
    ----------
    index
        The GPU as torch numbers it.
    directions
        Each gets memory and a stream of its own.
    memory
        The arena's, copied by `RuntimeLane`; None is memory that torch pins, copied by `PlainStream`.
    cores
        Those near the GPU.
    """

    def __init__(
        self,
        kind: str,
        index: int,
        node: Node,
        directions: Sequence[Direction],
        memory: HostMemory | None,
        cores: frozenset[int],
    ) -> None:
        ends = (f"hbm{index}", f"dram{node.number}")
        lane = directions[0] if memory is not None and len(directions) == 1 else None
        self.path = Path(kind, *(ends if "d2h" in directions else ends[::-1]), lane)
        self.cores = cores
        self._device = torch.device("cuda", index)
        self._node = node
        self._directions = directions
        self._memory = memory
        self._hold = _HOLD
        self._salt = 0
        self._blocks: list[DramBlock] = []
        self._copiers: list[Copier] = []
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def why_not(self) -> str | None:  # noqa: D102
        return cuda_refusal()

    def prepare(self, size: int) -> None:  # noqa: D102
        self._salt = secrets.randbits(32)
        for direction in self._directions:
            host = self._host(window(size))
            hbm = torch.empty(window(size), dtype=torch.uint8, device=self._device)
            destination, source = (host, hbm) if direction == "d2h" else (hbm, host)
            fill(source, self._salt)
            destination.zero_()
            self._pairs.append((destination, source))
            self._copiers.append(
                PlainStream(self._device) if self._memory is None else RuntimeLane(self._device, direction)
            )
        torch.cuda.synchronize(self._device)  # what follows runs on other streams than what was written here

    def run(self, size: int) -> Run:
        """Queue everything behind a kernel that keeps the streams waiting, then let them go together.

        So the time is that of the copies, without that of queueing them.
        """
        while True:
            gate = self._gate()
            ends = [(copier, self._queue(copier, *pair, size)) for copier, pair in self._paired()]
            held = not gate.query()
            over = self._over(ends)
            over.synchronize()
            if held:
                return Run(window(size) * len(ends), gate.elapsed_time(over) / 1e3)
            # The gate opened before all was queued, as on a slow or busy host.
            self._hold *= 2
            if self._hold > _LONGEST_HOLD:
                raise TiersError("the host is too busy to queue the copies while their streams are held")

    def intact(self) -> bool:  # noqa: D102
        return all(matches(destination, self._salt) for destination, _ in self._pairs)

    def release(self) -> None:  # noqa: D102
        for copier in self._copiers:
            copier.close()  # memory that a DMA still reads must not be given back
        self._copiers.clear()
        self._pairs.clear()
        if self._memory is not None:
            for block in self._blocks:
                self._memory.give(self._node, block)
        self._blocks.clear()

    def _host(self, nbytes: int) -> torch.Tensor:
        if self._memory is None:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._blocks.append(self._memory.take(self._node, nbytes))
        return self._blocks[-1].tensor

    def _paired(self) -> list[tuple[Copier, tuple[torch.Tensor, torch.Tensor]]]:
        return list(zip(self._copiers, self._pairs, strict=True))

    def _gate(self) -> torch.cuda.Event:
        with torch.cuda.device(self._device):
            torch.cuda._sleep(self._hold)
            gate = torch.cuda.Event(enable_timing=True)
            gate.record()
        return gate

    def _over(self, ends: Sequence[tuple[Copier, Event]]) -> torch.cuda.Event:
        """When the last of `ends` was passed: by themselves most of a lane's events keep no time."""
        for copier, end in ends:
            copier.hold(end)
        over = torch.cuda.Event(enable_timing=True)
        over.record(torch.cuda.current_stream(self._device))
        return over

    def _queue(self, copier: Copier, destination: torch.Tensor, source: torch.Tensor, size: int) -> Event:
        stream: Stream = torch._C._cuda_getCurrentStream(self._device.index)
        for index in range(copies(size)):  # at least one
            at = slice(index * size, (index + 1) * size)
            # A stream keeps its order, so only its first copy waits for the gate.
            end = copier.copy([whole(destination[at], source[at])], None if index else stream)
        return end
