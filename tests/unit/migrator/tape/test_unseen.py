"""Who writes without an operator is found out by versions, or has no producer from the start."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.migrator.tape.records import end, in_another_thread
from torch_tiers.migrator.tape.operators import Operator
from torch_tiers.migrator.tape.recorder import Recorder
from torch_tiers.migrator.tape.tape import Tape


def last(tape: Tape) -> Operator:
    return tape.operators[-1]


def test_write_through_data_is_seen(recorder: Recorder) -> None:
    recorder.begin()
    x = torch.ones(3)
    x.data.add_(1)
    x.sin()
    tape = end(recorder)
    write = next(each for each in tape.operators if each.name == "aten::add_.Tensor")
    assert x._version == 0 and last(tape).inputs[0].producer == write.number == tape.producer(x)


@pytest.mark.parametrize(
    ("change", "producer"),
    [(lambda x, y: setattr(x, "data", y), 1), (lambda x, y: x.set_(y), 1), (lambda x, y: x.t_(), 0)],
    ids=["another whose data it got", "another that it was set to", "itself if it was turned in place"],
)
def test_tensor_has_the_state_of(recorder: Recorder, change: Callable[[Tensor, Tensor], object], producer: int) -> None:
    recorder.begin()
    x, y = torch.ones(3, 2), torch.zeros(4, 2)
    change(x, y)
    x.sin()
    tape = end(recorder)
    assert last(tape).inputs[0].producer == tape.producer(x) == producer and tape.producer(y) == 1


def test_write_in_another_thread_is_unseen(recorder: Recorder) -> None:
    recorder.begin()
    x, y = torch.ones(3), torch.ones(3)
    in_another_thread(lambda: x.add_(1))
    x.sin()
    y.sin()
    tape = end(recorder)
    assert len(tape.operators) == 4
    assert [each.inputs[0].producer for each in tape.operators[2:]] == [None, 1]


def made_in_another_thread() -> Tensor:
    made: list[Tensor] = []
    in_another_thread(lambda: made.append(torch.ones(3)))
    return made[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.from_numpy(np.ones(3, dtype=np.float32)),
        lambda: torch.frombuffer(bytearray(12), dtype=torch.float32),
        lambda: torch.from_dlpack(np.ones(3, dtype=np.float32)),
        made_in_another_thread,
    ],
)
def test_memory_of_others_has_no_producer(recorder: Recorder, make: Callable[[], Tensor]) -> None:
    recorder.begin()
    x = make()
    x.sin()
    tape = end(recorder)
    assert last(tape).inputs[0].producer is None


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.numpy().fill(2),
        lambda x: np.from_dlpack(x).__setitem__(0, 2) if np.from_dlpack(x).flags.writeable else x.numpy().fill(2),
        lambda x: ctypes.memset(x.data_ptr(), 0, 4),
    ],
)
def test_write_that_is_told_of_makes_another_state(recorder: Recorder, write: Callable[[Tensor], object]) -> None:
    """Nobody else can know of it: versions count operators. What is made again of it must be compared once."""
    recorder.begin()
    x = torch.ones(3)
    y = torch.ones(3)
    write(x)
    recorder.unseen(x)
    x.sin()
    y.sin()
    tape = end(recorder)
    *_, first, second = tape.operators
    assert first.inputs[0].producer is None and second.inputs[0].producer == 1


def test_write_after_the_record_is_found_out(recorder: Recorder) -> None:
    recorder.begin()
    x = torch.ones(3)
    tape = end(recorder)
    assert tape.producer(x) == 0
    x.add_(1)
    assert tape.find(x) is None and tape.find(torch.ones(2)) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda recorder, x: [x.untyped_storage().resize_(nbytes) for nbytes in (0, 24)],
        lambda recorder, x: torch.autograd.graph.increment_version(x),
        lambda recorder, x: recorder.unseen(None),
    ],
    ids=["its storage is resized", "others count its version up", "anything may have been written"],
)
def test_it_is_another_state_where(recorder: Recorder, change: Callable[[Recorder, Tensor], object]) -> None:
    recorder.begin()
    x = torch.ones(3)
    x.cos()
    change(recorder, x)
    x.sin()
    ones, cos, sin = end(recorder).operators
    assert cos.inputs[0].producer == ones.number and sin.inputs[0].producer is None


def test_storage_that_is_emptied_and_refilled_has_who_refilled_it(recorder: Recorder) -> None:
    """As FSDP does it, without counting versions up."""
    x = torch.ones(3)
    recorder.begin()
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(12)
    with torch.autograd._unsafe_preserve_version_counter(x):
        x.fill_(2)
    x.sin()
    assert x._version == 0
    tape = end(recorder)
    assert last(tape).inputs[0].producer == last(tape).number - 1
