"""What is made again on a CUDA device: its random numbers, its streams, and what is captured."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.unit.migrator.tape.blocks import Block, Dropping
from tests.unit.migrator.tape.programs import Program, step
from torch_tiers.migrator.tape.closure import Closure, Differs, Refused
from torch_tiers.migrator.tape.recorder import Recorder

pytestmark = pytest.mark.gpu


def transformer() -> Program:
    model = nn.Sequential(Block(dropout=0.2), Block()).cuda()
    x = torch.randn(2, 8, 8, device="cuda")

    def forward() -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(x).float().square().sum()

    return forward, model


def convolutions() -> Program:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3), nn.Dropout(0.5)
    ).cuda()
    x = torch.randn(2, 3, 8, 8, device="cuda")
    return lambda: model(x).square().sum(), model


@pytest.mark.parametrize("make", [transformer, convolutions], ids=lambda make: make.__name__)
def test_gradients_of_what_is_made_again_are_the_same(recorder: Recorder, make: object) -> None:
    torch.manual_seed(0)
    program = transformer() if make is transformer else convolutions()
    _, model = program
    step(program)
    before = copy.deepcopy(model.state_dict())
    expected = step(program)
    drawn = torch.rand(3, device="cuda")
    model.load_state_dict(before)
    dropping = Dropping(recorder)
    recorder.begin()
    with dropping.hooks():
        found = step(program)
    recorder.stop()
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    # Some backwards on a GPU do not give the same twice.
    assert all(torch.allclose(one, other, rtol=1e-2, atol=1e-2) for one, other in zip(found, expected, strict=True))
    assert dropping.untrue == [] and len(dropping.made) >= 3 and dropping.runs >= 3
    assert set(dropping.refused) <= {"some of its bytes were never written"}


def test_random_numbers_are_drawn_again_and_none_of_the_program_s(recorder: Recorder) -> None:
    torch.cuda.manual_seed(5)
    given = torch.Generator("cuda").manual_seed(6)
    recorder.begin()
    x = torch.randn(100, device="cuda")
    y = F.dropout(x, 0.5)
    z = torch.rand(7, device="cuda", generator=given)
    before, given_before = torch.cuda.get_rng_state(), given.get_state()
    found = recorder.closure([x, y, z])
    assert isinstance(found, Closure) and found.random
    assert recorder.verify(found, [x, y, z])
    recorder.stop()
    assert torch.equal(torch.cuda.get_rng_state(), before) and torch.equal(given.get_state(), given_before)


def test_operators_of_two_streams_are_refused(recorder: Recorder) -> None:
    x = torch.ones(3, device="cuda")
    stream = torch.cuda.Stream()
    recorder.begin()
    y = x.sin()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        z = y.cos()
        alone = x.cos()
    both, one = recorder.closure([z]), recorder.closure([alone])
    recorder.stop()
    assert isinstance(both, Refused) and "another stream" in both.reason
    assert isinstance(one, Closure) and one.stream == stream.stream_id
    torch.cuda.synchronize()


def test_copy_that_the_host_waits_for_is_refused(recorder: Recorder) -> None:
    recorder.begin()
    x = torch.ones(3).to("cuda").sin()
    refused = recorder.closure([x])
    recorder.stop()
    assert isinstance(refused, Refused) and "the host waits" in refused.reason


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_nothing_is_made_while_a_graph_is_captured(recorder: Recorder) -> None:
    x = torch.ones(3, device="cuda")
    recorder.begin()
    y = x.sin()
    found = recorder.closure([y])
    recorder.stop()
    assert isinstance(found, Closure) and torch.equal(found.run()[0], y)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(Differs, match="captured"):
        found.run()


def test_precision_has_to_be_the_same(recorder: Recorder) -> None:
    x = torch.randn(64, 64, device="cuda")
    recorder.begin()
    y = x @ x
    found = recorder.closure([y])
    recorder.stop()
    assert isinstance(found, Closure)
    before = torch.backends.cudnn.deterministic
    try:
        torch.backends.cudnn.deterministic = not before
        with pytest.raises(Differs, match="settings"):
            found.run()
    finally:
        torch.backends.cudnn.deterministic = before
    assert torch.equal(found.run()[0], y)


def test_memory_of_what_nobody_needs_any_longer_is_free(recorder: Recorder) -> None:
    x = torch.ones(1 << 20, device="cuda")
    recorder.begin()
    y = x
    for _ in range(20):
        y = y.sin()
    found = recorder.closure([y])
    recorder.stop()
    assert isinstance(found, Closure)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (made,) = found.run()
    assert torch.equal(made, y)
    assert torch.cuda.max_memory_allocated() - before <= 3 * x.nbytes
