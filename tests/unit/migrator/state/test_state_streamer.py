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

from torch_tiers.migrator.state.parameter_state import PARAMETER, ParameterState
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

    def copy(self, pieces: Iterable[Piece], after: Sequence[Event], behind: Stream = None) -> Any:
        late = threading.Event()
        threading.Timer(self.random.random() / 500, late.set).start()
        return super().copy(pieces, [*after, Late(late)], behind)


class Late:
    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def query(self) -> bool:
        return self.event.is_set()

    def synchronize(self) -> None:
        self.event.wait()


class Failed:
    """The event of a copy that has failed, as whoever waits for it is told."""

    def __init__(self, copy: Event) -> None:
        self.query = copy.query

    def synchronize(self) -> None:
        raise OSError("no copy")


def of(tensors: dict[str, Tensor]) -> ParameterState:
    return ParameterState(0, torch.zeros(1), dict(tensors), tensors)


def streamer(seed: int = 0) -> StateStreamer:
    counters = Counters()
    counters.moved.update(read=0, write=0)
    lanes = [Slow(name, counters, random.Random(seed)) for name in ("read", "write")]
    return StateStreamer(HostCompute(counters), *lanes)


def slices(count: int, each: int = 1) -> list[list[ParameterState]]:
    tensors = torch.arange(count * each * NBYTES // 4, dtype=torch.float32).view(count, each, -1)
    return [[of({"moment": tensors[i, j].clone()}) for j in range(each)] for i in range(count)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("slots", [1, 2, 3, 7])
def test_every_slice_is_updated_once_with_its_own_state(slots: int, seed: int) -> None:
    all_slices = slices(9, each=1 + seed % 2)
    expected = [each.tensors["moment"] * 2 + 1 for slice_ in all_slices for each in slice_]
    all_states = [each for slice_ in all_slices for each in slice_]
    order: list[Tensor] = []

    def update(slice_: Sequence[ParameterState]) -> None:
        assert all(each.state["moment"] is each.tensors["moment"] for each in all_states), "the optimizer has its own"
        for each in slice_:
            each.state["moment"].mul_(2).add_(1)
            order.append(each.parameter)

    streaming = streamer(seed)
    streaming.run(all_slices, torch.empty(slots * (1 + seed % 2) * NBYTES, dtype=torch.uint8), update)
    streaming.close()
    assert all(one is each.parameter for one, each in zip(order, all_states, strict=True))
    for each, wanted in zip(all_states, expected, strict=True):
        assert each.state["moment"] is each.tensors["moment"], "the optimizer still has its own tensors"
        assert torch.equal(each.tensors["moment"], wanted)


def test_a_parameter_comes_with_its_gradient_and_is_written_as_by_an_operator() -> None:
    parameter = torch.nn.Parameter(torch.rand(NBYTES // 4))
    parameter.grad, moment = torch.rand(NBYTES // 4), torch.rand(NBYTES // 4)
    address, version, wanted = parameter.data_ptr(), parameter._version, parameter.detach() - parameter.grad
    each = ParameterState(0, parameter, {"moment": moment}, {PARAMETER: parameter, "moment": moment})

    def update(slice_: Sequence[ParameterState]) -> None:
        there = slice_[0].parameter
        assert there.data_ptr() != address and there.grad is parameter.grad and list(slice_[0].state) == ["moment"]
        there.sub_(there.grad)

    streaming = streamer()
    streaming.run([[each]], torch.empty(2 * NBYTES, dtype=torch.uint8), update)
    streaming.close()
    assert parameter.data_ptr() == address and parameter._version > version
    assert torch.equal(parameter, wanted)


def test_a_tensor_keeps_its_strides_and_type_in_the_buffer() -> None:
    tensor = torch.rand(4, 8, 4, 8).to(memory_format=torch.channels_last).to(torch.float64)
    seen: list[Tensor] = []
    each = of({"moment": tensor})
    streaming = streamer()
    streaming.run(
        [[each]],
        torch.empty(2 * tensor.nbytes, dtype=torch.uint8),
        lambda slice_: seen.append(slice_[0].state["moment"].clone()),
    )
    streaming.close()
    assert torch.equal(seen[0], tensor)
    assert seen[0].stride() == tensor.stride()


def test_what_was_updated_before_an_error_is_kept_as_it_is() -> None:
    first, second, third = all_slices = slices(3)
    before = [slice_[0].tensors["moment"].clone() for slice_ in all_slices]

    def update(slice_: Sequence[ParameterState]) -> None:
        slice_[0].state["moment"].add_(1)
        if slice_[0].parameter is second[0].parameter:
            raise RuntimeError("half way")

    streaming = streamer()
    with pytest.raises(RuntimeError, match="half way"):
        streaming.run(all_slices, torch.empty(3 * NBYTES, dtype=torch.uint8), update)
    streaming.close()
    assert torch.equal(first[0].tensors["moment"], before[0] + 1)
    assert torch.equal(second[0].tensors["moment"], before[1] + 1)
    assert torch.equal(third[0].tensors["moment"], before[2])
    assert second[0].state["moment"] is second[0].tensors["moment"]


@pytest.mark.parametrize("fails", range(1, 7))
def test_a_slice_that_cannot_be_copied_back_is_an_error(fails: int) -> None:
    """Also where that is known long after: else its parameters were updated, and its state was not."""

    class Fails(HostLane):
        copies = 0

        def copy(self, pieces: Iterable[Piece], after: Sequence[Event], behind: Stream = None) -> Any:
            self.copies += 1
            done = super().copy(pieces, after, behind)
            return Failed(done) if self.copies == fails else done

    counters = Counters()
    counters.moved.update(read=0, write=0)
    streaming = StateStreamer(HostCompute(counters), HostLane("read", counters), Fails("write", counters))
    with pytest.raises(OSError, match="no copy"):
        streaming.run(slices(6), torch.empty(3 * NBYTES, dtype=torch.uint8), lambda *_: None)
    streaming.close()


def test_what_an_optimizer_puts_in_the_place_of_its_state_stays() -> None:
    slice_, other = slices(1)[0], torch.zeros(3)
    buffer = torch.empty(NBYTES, dtype=torch.uint8)
    streaming = streamer()
    streaming.run([slice_], buffer, lambda updated: updated[0].state.update(moment=other, new=3))
    streaming.close()
    assert slice_[0].state["moment"] is other
    assert slice_[0].state["new"] == 3


def test_the_next_slice_comes_while_one_is_updated() -> None:
    all_slices = slices(3)
    buffer = torch.zeros(3 * NBYTES, dtype=torch.uint8)
    second = all_slices[1][0].tensors["moment"].clone()
    streaming = streamer()
    came: list[bool] = []

    def update(slice_: Sequence[ParameterState]) -> None:
        deadline = time.monotonic() + 10
        there = buffer.view(torch.float32)[NBYTES // 4 : 2 * NBYTES // 4]
        while not (came or torch.equal(there, second)) and time.monotonic() < deadline:
            time.sleep(0.001)
        came.append(torch.equal(there, second))

    streaming.run(all_slices, buffer, update)
    streaming.close()
    assert came[0]


def test_nothing_outside_of_the_buffer_is_touched() -> None:
    """The buffer may be a part of a block, of which the rest lies in DRAM."""
    whole = torch.full((8 * NBYTES,), 7, dtype=torch.uint8)
    buffer = whole[2 * NBYTES : 5 * NBYTES]
    low, high = buffer.data_ptr(), buffer.data_ptr() + buffer.numel()

    def update(slice_: Sequence[ParameterState]) -> None:
        assert all(low <= each.state["moment"].data_ptr() < high for each in slice_)
        slice_[0].state["moment"].add_(1)

    streaming = streamer()
    streaming.run(slices(9), buffer, update)
    streaming.close()
    assert (whole[: 2 * NBYTES] == 7).all() and (whole[5 * NBYTES :] == 7).all()
