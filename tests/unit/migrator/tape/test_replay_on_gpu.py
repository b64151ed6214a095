"""What is made again on a CUDA device: its random numbers, its streams, and what is captured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.unit.migrator.tape.blocks import Block, Dropping
from tests.unit.migrator.tape.programs import Program, step
from tests.unit.migrator.tape.records import Taped, made_of
from torch_tiers.migrator.tape.closure import Bound, Differs
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


@pytest.mark.parametrize("notes", [False, True], ids=["from what was there before", "from what else was saved"])
@pytest.mark.parametrize("make", [transformer, convolutions], ids=lambda make: make.__name__)
def test_gradients_of_what_is_made_again_are_the_same(
    recorder: Recorder, make: Callable[[], Program], *, notes: bool
) -> None:
    torch.manual_seed(0)
    program = make()
    _, model = program
    step(program)
    before = copy.deepcopy(model.state_dict())
    expected = step(program)
    drawn = torch.rand(3, device="cuda")
    model.load_state_dict(before)
    dropping = Dropping(recorder, notes)
    dropping.begin()
    with dropping.hooks():
        found = step(program)
    recorder.stop()
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    # Some backwards on a GPU do not give the same twice.
    assert all(torch.allclose(one, other, rtol=1e-2, atol=1e-2) for one, other in zip(found, expected, strict=True))
    assert dropping.untrue == [] and len(dropping.made) >= 3 and dropping.runs >= 3


@pytest.fixture
def x() -> Tensor:
    return torch.randn(64, 64, device="cuda")


@pytest.fixture
def taped(recorder: Recorder, x: Tensor) -> Iterator[Taped]:
    yield Taped(recorder)
    recorder.stop()
    torch.cuda.synchronize()


def found(closure: Bound | None) -> Bound:
    assert closure is not None
    return closure


def test_random_numbers_are_drawn_again_and_none_of_the_program_s(taped: Taped) -> None:
    torch.cuda.manual_seed(5)
    given = torch.Generator("cuda").manual_seed(6)
    x = torch.randn(100, device="cuda")
    y = F.dropout(x, 0.5)
    z = torch.rand(7, device="cuda", generator=given)
    w = torch.rand(7, device="cuda", generator=given)
    before, given_before = torch.cuda.get_rng_state(), given.get_state()
    for each in (x, y, z, w):
        assert torch.equal(*made_of(found(taped.find(each))), each)
    assert torch.equal(torch.cuda.get_rng_state(), before) and torch.equal(given.get_state(), given_before)


def test_operators_of_two_streams_have_no_closure(taped: Taped, x: Tensor) -> None:
    stream = torch.cuda.Stream()
    y = x.sin()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        z = y.cos()
        alone = x.cos()
    assert taped.find(z) is None and taped.find(alone) is not None


@pytest.mark.parametrize("non_blocking", [False, True])
def test_copy_from_the_host_has_a_closure_if_the_host_does_not_wait_for_it(taped: Taped, *, non_blocking: bool) -> None:
    y = torch.ones(3).to("cuda", non_blocking=non_blocking).sin()
    assert (taped.find(y) is not None) == non_blocking


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_nothing_is_made_while_a_graph_is_captured(taped: Taped, x: Tensor) -> None:
    y = x.sin()
    closure = found(taped.find(y))
    taped.recorder.stop()
    assert torch.equal(*closure.make([]), y)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(Differs, match="captured"):
        closure.make([])


def test_settings_have_to_be_the_same(taped: Taped, x: Tensor) -> None:
    y = x @ x
    closure = found(taped.find(y))
    taped.recorder.stop()
    before = torch.backends.cudnn.deterministic
    try:
        torch.backends.cudnn.deterministic = not before
        with pytest.raises(Differs, match="settings"):
            closure.make([])
    finally:
        torch.backends.cudnn.deterministic = before
    assert torch.equal(*closure.make([]), y)


def test_memory_of_what_nobody_needs_any_longer_is_free(recorder: Recorder) -> None:
    x = torch.ones(1 << 20, device="cuda")
    taped = Taped(recorder)
    y = x
    for _ in range(20):
        y = y.sin()
    closure = found(taped.find(y))
    recorder.stop()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (made,) = closure.make([])
    assert torch.equal(made, y)
    assert torch.cuda.max_memory_allocated() - before <= 3 * x.nbytes
