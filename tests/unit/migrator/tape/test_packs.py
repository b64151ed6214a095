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
    values = {"net:0": x.clone(), "net:1": y.clone()}  # wherever these were brought back to
    assert torch.equal(found.make([values[key] for key in found.keys]), y.cos() + x)


def test_value_may_lie_anywhere_in_a_larger_storage(recording: Recorder, x: Tensor) -> None:
    packs = recording.packs()
    y = x.sin()
    packs.note(y, packed := Packed(), "net:0")
    found = packs.find(y.cos(), recording.settings(), lambda storage: True)
    assert found is not None and found.inputs == (packed,)
    buffer = torch.zeros(4096)
    buffer[1024:2048] = y
    assert torch.equal(found.make([buffer[1024:2048]]), y.cos())


def test_nothing_is_made_of_what_the_graph_has_let_go_of(recording: Recorder, x: Tensor) -> None:
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


def test_of_the_host_s_memory_only_that_is_taken_which_nobody_writes_unseen(recording: Recorder, x: Tensor) -> None:
    packs = recording.packs()
    y = x.sin()
    assert packs.find(y, recording.settings(), lambda storage: storage != x.untyped_storage()._cdata) is None
    found = packs.find(y, recording.settings(), lambda storage: True)
    assert found is not None and found.inputs == () and torch.equal(found.make([]), y)


def test_its_own_leaf_is_copied_before_it_is_written(recording: Recorder, x: Tensor) -> None:
    packs = recording.packs()
    y = x.sin()
    found = packs.find(y, recording.settings(), lambda storage: True)
    assert found is not None
    x.zero_()
    x.add_(1)
    assert torch.equal(found.make([]), y)


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
    assert packs.find(x.sin(), settings ^ 1, lambda storage: True) is None
    assert packs.find(x.sin(), settings, lambda storage: True) is not None


def test_there_is_none_for_a_part_of_a_storage_nor_begins_any_with_one(recording: Recorder, x: Tensor) -> None:
    packs = recording.packs()
    y = x.sin()
    part = y[:16].detach()
    assert packs.find(part, recording.settings(), lambda storage: True) is None
    packs.note(part, _ := Packed(), "net:0")
    found = packs.find(part.cos(), recording.settings(), lambda storage: True)
    assert found is not None and found.inputs == ()


def test_nothing_is_found_once_the_record_is_over(recorder: Recorder) -> None:
    x = torch.randn(1024)
    recorder.begin()
    packs = recorder.packs()
    y = x.sin()
    recorder.stop()
    packs.note(x, kept(x), "net:0")
    assert packs.find(y, recorder.settings(), lambda storage: True) is None
