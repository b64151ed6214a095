"""State comes to the buffer before its update and leaves after it, and no copy overtakes what it must wait for."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_tiers.migrator.state.kept import Kept
from torch_tiers.migrator.state.streamer import StateStreamer
from torch_tiers.migrator.streams import Event, Stream
from torch_tiers.migrator.streams.host import HostCompute, HostLane
from torch_tiers.migrator.streams.pieces import Piece
from torch_tiers.migrator.telemetry.counters import Counters

NBYTES = 4096


class Slow(HostLane):
    """A lane that begins its copies at any time later."""

    def __init__(self, name: str, counters: Counters, random: random.Random) -> None:
        super().__init__(name, counters)
        self.random = random
        self.under_way = 0

    def copy(self, pieces: Iterable[Piece], after: Sequence[Event], behind: Stream = None) -> Any:
        late = threading.Event()
        threading.Timer(self.random.random() / 500, late.set).start()
        self.under_way += 1
        return super().copy(pieces, [*after, Late(late)], behind)


class Late:
    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def query(self) -> bool:
        return self.event.is_set()

    def synchronize(self) -> None:
        self.event.wait()


def kept(tensors: dict[str, Tensor]) -> Kept:
    return Kept(0, torch.zeros(1), dict(tensors), tensors)


def streamer(seed: int = 0) -> StateStreamer:
    counters = Counters()
    counters.moved.update(read=0, write=0)
    lanes = [Slow(name, counters, random.Random(seed)) for name in ("read", "write")]
    return StateStreamer(HostCompute(counters), *lanes)


def slices(count: int, each: int = 1) -> list[list[Kept]]:
    tensors = torch.arange(count * each * NBYTES // 4, dtype=torch.float32).view(count, each, -1)
    return [[kept({"moment": tensors[i, j].clone()}) for j in range(each)] for i in range(count)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("slots", [1, 2, 3, 7])
def test_every_slice_is_updated_once_with_its_own_state(slots: int, seed: int) -> None:
    all_slices = slices(9, each=1 + seed % 2)
    expected = [each.tensors["moment"] * 2 + 1 for slice_ in all_slices for each in slice_]
    order: list[Kept] = []

    def update(slice_: Sequence[Kept]) -> None:
        for each in slice_:
            each.state["moment"].mul_(2).add_(1)
            order.append(each)

    streams = streamer(seed)
    streams.run(all_slices, torch.empty(slots * (1 + seed % 2) * NBYTES, dtype=torch.uint8), update)
    streams.close()
    assert all(one is other for one, other in zip(order, (k for s in all_slices for k in s), strict=True))
    for each, wanted in zip(order, expected, strict=True):
        assert each.state["moment"] is each.tensors["moment"], "the optimizer has its own tensors again"
        assert torch.equal(each.tensors["moment"], wanted)


def test_a_tensor_keeps_its_strides_and_type_in_the_buffer() -> None:
    tensor = torch.rand(4, 8, 4, 8).to(memory_format=torch.channels_last).to(torch.float64)
    seen: list[Tensor] = []
    each = kept({"moment": tensor})
    streams = streamer()
    streams.run(
        [[each]], torch.empty(2 * tensor.nbytes, dtype=torch.uint8), lambda _: seen.append(each.state["moment"].clone())
    )
    streams.close()
    assert torch.equal(seen[0], tensor)
    assert seen[0].stride() == tensor.stride()


def test_what_was_updated_before_an_error_is_kept_as_it_is() -> None:
    first, second, third = all_slices = slices(3)
    before = [slice_[0].tensors["moment"].clone() for slice_ in all_slices]

    def update(slice_: Sequence[Kept]) -> None:
        slice_[0].state["moment"].add_(1)
        if slice_ is second:
            raise RuntimeError("half way")

    streams = streamer()
    with pytest.raises(RuntimeError, match="half way"):
        streams.run(all_slices, torch.empty(3 * NBYTES, dtype=torch.uint8), update)
    streams.close()
    assert torch.equal(first[0].tensors["moment"], before[0] + 1)
    assert torch.equal(second[0].tensors["moment"], before[1] + 1)
    assert torch.equal(third[0].tensors["moment"], before[2])
    assert second[0].state["moment"] is second[0].tensors["moment"]


def test_what_an_optimizer_puts_in_the_place_of_its_state_stays() -> None:
    slice_, other = slices(1)[0], torch.zeros(3)
    buffer = torch.empty(NBYTES, dtype=torch.uint8)
    streams = streamer()
    streams.run([slice_], buffer, lambda updated: updated[0].state.update(moment=other))
    streams.close()
    assert slice_[0].state["moment"] is other


def test_the_next_slice_comes_while_one_is_updated() -> None:
    all_slices = slices(3)
    counters = Counters()
    counters.moved.update(read=0, write=0)
    read = HostLane("read", counters)
    streams = StateStreamer(HostCompute(counters), read, HostLane("write", counters))
    came: list[int] = []

    def update(slice_: Sequence[Kept]) -> None:
        deadline = time.monotonic() + 10
        while counters.moved["read"] < 2 * NBYTES and time.monotonic() < deadline:
            time.sleep(0.001)
        came.append(counters.moved["read"] // NBYTES)

    streams.run(all_slices, torch.empty(3 * NBYTES, dtype=torch.uint8), update)
    streams.close()
    assert came[0] >= 2
