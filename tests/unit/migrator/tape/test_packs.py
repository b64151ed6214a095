"""Closures that begin with what was packed of other tensors, and hold the rest themselves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_tiers.migrator.tape.closure import Differs
from torch_tiers.migrator.tape.recorder import Recorder


class Packed:
    """Stands in a graph for a tensor that is elsewhere by now."""


@pytest.fixture
def x() -> Tensor:
    """Made before anything was recorded, as parameters are."""
    return torch.randn(1024)


@pytest.fixture
def recording(recorder: Recorder, x: Tensor) -> Iterator[Recorder]:
    recorder.begin()
    yield recorder
    recorder.stop()


def kept(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.detach(), tensor._version, None, None)


def test_what_it_takes_is_what_was_packed_and_where(recording: Recorder, x: Tensor) -> None:
    packs = recording.packs()
    y = x.sin()
    packed, stays = Packed(), kept(x)
    packs.note(x, stays, "net:0")
    packs.note(y, packed, "net:1")
    found = packs.find(y.cos() + x, recording.settings(), lambda storage: False)
    assert found is not None and set(found.keys) == {"net:0", "net:1"}
    by_key = dict(zip(found.keys, found.inputs, strict=True))
    assert by_key["net:1"] is packed and by_key["net:0"][0] is stays[0] and by_key["net:0"][1:] == stays[1:]
    buffer = torch.zeros(4096)
    buffer[1024:2048] = y
    values = {"net:0": x.clone(), "net:1": buffer[1024:2048]}  # wherever in a larger storage these were brought back to
    assert torch.equal(*found.make([values[key] for key in found.keys]), y.cos() + x)


def test_nothing_is_made_of_what_the_graph_has_released(recording: Recorder, x: Tensor) -> None:
    packs = recording.packs()
    packs.note(x, packed := Packed(), "net:0")
    y = x.sin()
    del packed
    gc.collect()
    assert packs.find(y, recording.settings(), lambda storage: False) is None
    again = Packed()
    packs.note(x, again, "net:0")
    found = packs.find(y, recording.settings(), lambda storage: False)
    assert found is not None and found.inputs == (again,)


def test_of_the_host_s_memory_only_that_is_taken_which_nobody_writes_unseen_and_copied_before_it_is_written(
    recording: Recorder, x: Tensor
) -> None:
    packs = recording.packs()
    y = x.sin()
    assert packs.find(y, recording.settings(), lambda storage: storage != x.untyped_storage()._cdata) is None
    found = packs.find(y, recording.settings(), lambda storage: True)
    assert found is not None and found.inputs == () and torch.equal(*found.make([]), y)
    x.zero_()
    x.add_(1)
    assert torch.equal(*found.make([]), y)


def test_what_was_packed_and_then_written_is_not_taken_where_it_was(recording: Recorder, x: Tensor) -> None:
    packs = recording.packs()
    packs.note(x, _ := kept(x), "net:0")
    y = x.sin()
    found = packs.find(y, recording.settings(), lambda storage: True)
    assert found is not None and len(found.inputs) == 1
    x.zero_()
    assert found.is_stale
    with pytest.raises(Differs):
        found.make([x])


def test_there_is_none_under_other_settings(recording: Recorder, x: Tensor) -> None:
    packs = recording.packs()
    settings = recording.settings()
    assert packs.find(x.softmax(0), settings ^ 1, lambda storage: True) is None
    assert packs.find(x.softmax(0), settings, lambda storage: True) is not None


def test_settings_are_nothing_to_views_and_to_what_takes_each_element_by_itself(recording: Recorder, x: Tensor) -> None:
    packs, settings = recording.packs(), recording.settings()
    before = torch._C._get_mkldnn_enabled()
    try:
        torch._C._set_mkldnn_enabled(not before)
        x.softmax(0)
        y = x.sin()
    finally:
        torch._C._set_mkldnn_enabled(before)
    z = y.view(-1, 1).cos()
    found = packs.find(z, settings, lambda storage: True)
    assert found is not None and torch.equal(*found.make([]), z)


def test_there_is_none_for_a_part_of_a_storage_nor_begins_any_with_one(recording: Recorder, x: Tensor) -> None:
    packs = recording.packs()
    y = x.sin()
    part = y[:16].detach()
    assert packs.find(part, recording.settings(), lambda storage: True) is None
    packs.note(part, _ := Packed(), "net:0")
    found = packs.find(part.cos(), recording.settings(), lambda storage: True)
    assert found is not None and found.inputs == ()


def test_of_what_was_packed_of_a_part_the_rest_is_copied_before_it_is_written(recording: Recorder, x: Tensor) -> None:
    """Nobody says that the rest stays as it is: the graph knows of the part alone."""
    packs, settings = recording.packs(), recording.settings()
    most = x[16:]
    packs.note(most, _ := Packed(), "net:0")
    y, before = x.sin(), x.clone()
    found = packs.find(y, settings, lambda storage: True)
    assert found is not None and len(found.inputs) == 1
    assert torch.equal(*found.make([before[16:]]), y)
    x[:16].zero_()
    assert torch.equal(*found.make([most]), y), "it has a copy by now, wherever what was packed is"
    packs.note(most, _ := Packed(), "net:0")
    z = x.cos()
    x[:16].add_(1)
    assert packs.find(z, settings, lambda storage: True) is None, "nobody has what was there"


def test_nothing_is_found_once_the_record_is_over(recorder: Recorder) -> None:
    x = torch.randn(1024)
    recorder.begin()
    packs = recorder.packs()
    y = x.sin()
    recorder.stop()
    packs.note(x, kept(x), "net:0")
    assert packs.find(y, recorder.settings(), lambda storage: True) is None


def _fill(storage_of: Tensor, values: Tensor) -> None:
    """As FSDP gathers a parameter, which was empty."""
    storage_of.untyped_storage().resize_(values.nbytes)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(storage_of):
        storage_of.copy_(values)


def test_what_is_emptied_and_filled_again_need_not_be_packed(recording: Recorder, x: Tensor) -> None:
    """As the parameters that FSDP gathers for each forward and backward: a bias that nobody saves, for one."""
    packs, values = recording.packs(), torch.randn(1024)
    weight = torch.empty(1024)
    packs.refilled([weight.untyped_storage()._cdata])
    weight.untyped_storage().resize_(0)
    _fill(weight, values)
    packs.note(x, packed := Packed(), "net:0")
    found = packs.find(expected := x * weight, recording.settings(), lambda storage: False)
    assert found is not None and found.inputs == (packed,)
    weight.untyped_storage().resize_(0)
    with pytest.raises(Differs, match="has another size"):
        found.make([x])
    _fill(weight, values)
    assert torch.equal(*found.make([x]), expected)


def test_what_is_empty_already_nothing_is_made_from(recording: Recorder, x: Tensor) -> None:
    """Another layer's parameters are not there when this one's backward asks for what it saved."""
    packs, weight = recording.packs(), torch.empty(1024)
    packs.refilled([weight.untyped_storage()._cdata])
    _fill(weight, torch.randn(1024))
    made = x * weight
    packs.note(x, Packed(), "net:0")
    weight.untyped_storage().resize_(0)
    assert packs.find(made, recording.settings(), lambda storage: False) is None


def test_what_one_operator_returned_is_made_at_once(recording: Recorder, x: Tensor) -> None:
    packs, settings = recording.packs(), recording.settings()
    packs.note(x, packed := Packed(), "net:0")
    values, indices = torch.sort(x)
    one, other, third = (packs.find(of, settings, lambda storage: False) for of in (values, indices, x.sin()))
    assert one is not None and other is not None and third is not None
    assert one.last == other.last != third.last
    assert not third.also(one) and other.also(one)
    made = other.make([x])
    assert other.inputs == (packed,) and torch.equal(made[0], values) and torch.equal(made[1], indices)
    assert torch.equal(*one.make([x]), values), "the other one is as it was"


def test_three_of_one_operator_may_join(recording: Recorder, x: Tensor) -> None:
    packs, settings = recording.packs(), recording.settings()
    packs.note(x, packed := Packed(), "net:0")
    expected = torch.native_layer_norm(x.view(32, 32), (32,), None, None, 1e-5)
    closures = [packs.find(each, settings, lambda storage: False) for each in expected]
    first, second, third = closures
    assert first is not None and second is not None and third is not None
    assert second.also(first) and third.also(second) and third.inputs == (packed,)
    assert all(map(torch.equal, third.make([x]), expected))
