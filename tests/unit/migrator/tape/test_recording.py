"""What is noted of each operator, and of what it made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.unit.migrator.tape.records import end, names
from torch_tiers.migrator.tape.recorder import Recorder


def test_nothing_is_recorded_outside_of_a_record(recorder: Recorder) -> None:
    x = torch.ones(3)
    x.sin()
    recorder.begin()
    x.cos()
    tape = end(recorder)
    x.tan()
    assert names(tape) == ["cos"] and recorder.end() is None


def test_nothing_is_recorded_in_an_untracked_scope(recorder: Recorder) -> None:
    x = torch.ones(3)
    recorder.begin()
    with recorder.untracked():
        x.sin()
        with recorder.untracked():
            x.sin()
        x.sin()
    x.cos()
    assert names(end(recorder)) == ["cos"]


def test_one_record_at_a_time(recorder: Recorder) -> None:
    assert recorder.begin() and not recorder.begin()
    end(recorder)
    assert recorder.begin()


def test_what_an_operator_calls_is_not_recorded(recorder: Recorder) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    recorder.begin()
    F.layer_norm(x, (3,))
    F.linear(x, x)
    assert names(end(recorder)) == ["native_layer_norm", "t", "mm"]


def test_view_has_the_state_of_its_base(recorder: Recorder) -> None:
    recorder.begin()
    x = torch.ones(4, 4)
    row = x[1]
    made, select = end(recorder).operators
    assert made.outputs[0].producer == 0
    assert select.inputs[0] == made.outputs[0]
    assert select.outputs[0].storage == made.outputs[0].storage and select.outputs[0].producer == 0
    form = select.outputs[0].form
    assert form is not None and (form.offset, form.sizes, form.strides) == (16, (4,), (1,))
    assert row.dtype == form.dtype and row.device == form.device


def test_who_writes_in_place_is_the_producer_from_then_on(recorder: Recorder) -> None:
    recorder.begin()
    x = torch.ones(4)
    y = x[:2]
    y.mul_(2)
    x.add(1)
    tape = end(recorder)
    multiplied, added = tape.operators[2], tape.operators[3]
    assert multiplied.inputs[0].producer == 0 and multiplied.outputs[0].producer == 2
    assert multiplied.writes == multiplied.inputs[:1] and added.writes == ()
    assert added.inputs[0].producer == 2 and added.inputs[0].version == x._version == 1
    assert tape.producer(x) == tape.producer(y) == 2


def test_what_was_there_before_has_no_producer_and_one_state_until_it_is_written(recorder: Recorder) -> None:
    x = torch.ones(3)
    recorder.begin()
    x.sin()
    x.cos()
    x.add_(1)
    x.sin()
    sin, cos, add, again = end(recorder).operators
    assert sin.inputs[0].producer is None and sin.inputs[0].state == cos.inputs[0].state < 0
    assert add.number == again.inputs[0].producer


@pytest.mark.parametrize("out", [False, True])
def test_output_given_is_written(recorder: Recorder, out: bool) -> None:
    x, y = torch.ones(3), torch.empty(0)
    recorder.begin()
    if out:
        torch.sin(x, out=y)
    else:
        torch._foreach_sin_([y, x])
    tape = end(recorder)
    assert tape.producer(y) == 0 and tape.producer(x) == (None if out else 0)


def test_batch_norm_writes_its_statistics(recorder: Recorder) -> None:
    norm, x = nn.BatchNorm1d(3), torch.randn(4, 3)
    recorder.begin()
    norm(x)
    tape = end(recorder)
    (number,) = [each.number for each in tape.operators if "batch_norm" in each.name]
    assert norm.running_mean is not None and tape.producer(norm.running_mean) == number


def test_numbers_are_kept_and_tensors_are_not(recorder: Recorder) -> None:
    x = torch.ones(4, 4)
    recorder.begin()
    x.sum([0], keepdim=True)
    x * 2.5
    torch.cat([x, x], 1)
    total, times, cat = (each.step for each in end(recorder).operators)
    assert total.arguments[1:3] == ([0], True) and total.whole
    assert times.arguments == (None, 2.5)
    assert cat.arguments == (None, 1) and cat.places == ((0, 0), (0, 1))


def test_no_memory_is_kept(recorder: Recorder) -> None:
    recorder.begin()
    x = torch.ones(100)
    kept = x + 1
    del x
    tape = end(recorder)
    dead, alive = tape.operators[1].inputs[0].storage, tape.operators[1].outputs[0].storage
    assert dead is not None and alive is not None
    assert not tape.is_alive(dead) and tape.is_alive(alive) and tape.producer(kept) == 1
    assert tape.storages[dead] == 400


def test_address_that_is_used_again_is_another_storage(recorder: Recorder) -> None:
    recorder.begin()
    for _ in range(20):
        torch.ones(64)
    assert len({each.outputs[0].storage for each in end(recorder).operators}) == 20


def test_error_leaves_a_true_tape(recorder: Recorder) -> None:
    x, y = torch.ones(2, 3), torch.ones(3)
    recorder.begin()
    y.add_(1)
    with pytest.raises(RuntimeError):
        y.index_add_(0, torch.tensor([7]), y)
    y.sin()
    with pytest.raises(RuntimeError):
        x @ x
    x.cos()
    tape = end(recorder)
    assert [each.name for each in tape.operators if each.raised] == ["aten::index_add_", "aten::mm"]
    sin = next(each for each in tape.operators if each.name == "aten::sin")
    assert sin.inputs[0].producer is None  # it may have written half of it
    assert not tape.operators[-1].raised and tape.operators[-1].outputs


def test_generator_s_state_is_noted_before_it_is_drawn_from(recorder: Recorder) -> None:
    own = torch.Generator().manual_seed(5)
    recorder.begin(states=True)
    x = torch.rand(3)
    y = torch.rand(3, generator=own)
    first, second = end(recorder).draws
    assert first.by_default and not second.by_default and second.seed == 5
    for drawn, draw in ((x, first), (y, second)):
        assert draw.state is not None
        again = torch.Generator()
        again.set_state(torch.frombuffer(bytearray(draw.state), dtype=torch.uint8))
        assert torch.equal(torch.rand(3, generator=again), drawn)


@pytest.mark.parametrize(
    ("operate", "waits"),
    [
        (lambda x: x.sum(), False),
        (lambda x: x.sum().item(), True),
        (lambda x: x.nonzero(), True),
        (lambda x: torch.equal(x, x), True),
        (lambda x: x[x > 2], True),
        (lambda x: x[torch.tensor([1])], False),
        (lambda x: x.masked_select(x > 2), True),
    ],
)
def test_host_waits_where_it_reads_what_was_computed(recorder: Recorder, operate: Any, waits: bool) -> None:
    x = torch.arange(4.0)
    recorder.begin()
    operate(x)
    assert any(each.waits for each in end(recorder).operators) == waits
