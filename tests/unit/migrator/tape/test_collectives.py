"""Collectives write what they receive and are not run again: other ranks take part."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.unit.migrator.tape.records import Taped, short
from torch_tiers.migrator.tape.recorder import Recorder

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no collectives")


@pytest.fixture
def taped(recorder: Recorder) -> Iterator[Taped]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Taped(recorder)
    finally:
        recorder.stop()
        dist.destroy_process_group()


def all_gathered(x: Tensor, other: Tensor) -> None:
    dist.all_gather_into_tensor(x, other)


def gathered(x: Tensor, other: Tensor) -> None:
    dist.all_gather([x], other)


@pytest.mark.parametrize(
    "receive",
    [lambda x, other: dist.all_reduce(x), lambda x, other: dist.broadcast(x, 0), all_gathered, gathered],
    ids=["all_reduce", "broadcast", "all_gather_into_tensor", "all_gather"],
)
def test_what_was_received_is_made_again_only_from_what_was_packed(
    taped: Taped, receive: Callable[[Tensor, Tensor], object]
) -> None:
    x, other = torch.ones(4), torch.zeros(4)
    receive(x, other)
    y, z = x.sin(), other.cos()
    assert taped.find(x) is None and taped.find(y) is None
    assert short(taped.find(z)) == ["zeros", "cos"]
    packed = taped.note(x)
    y = x.sin()
    found = taped.find(y)
    assert found is not None and found.inputs == (packed,)
    taped.made_again(y)
