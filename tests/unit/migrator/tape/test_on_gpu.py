"""What is asked of a CUDA device while operators are recorded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.unit.migrator.tape.records import end, names
from torch_tiers.migrator.tape.recorder import Recorder

pytestmark = pytest.mark.gpu


def test_what_is_captured_into_a_graph_is_not_recorded(recorder: Recorder) -> None:
    x = torch.ones(3, device="cuda")
    x.sin().cos()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    recorder.begin()
    with torch.cuda.graph(graph):
        y = x.sin()
    x.cos()
    graph.replay()
    tape = end(recorder)
    assert "sin" not in names(tape) and names(tape)[-1] == "cos"  # before a capture PyTorch fills numbers of its own
    assert tape.producer(y) is None


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_graphed_callable_is_right_and_not_recorded(recorder: Recorder) -> None:
    model = nn.Linear(4, 4, device="cuda")
    x = torch.ones(2, 4, device="cuda", requires_grad=True)
    expected = model(x).detach().clone()
    recorder.begin()
    graphed = torch.cuda.make_graphed_callables(model, (x,))
    found = graphed(x)
    tape = end(recorder)
    assert torch.equal(found, expected)
    assert not {"addmm", "mm"} & {
        name for each, name in zip(tape.operators, names(tape), strict=True) if not each.stream
    }


def test_seed_and_offset_are_those_before_it_drew(recorder: Recorder) -> None:
    torch.cuda.manual_seed(7)
    recorder.begin()
    torch.rand(3, device="cuda")
    x = torch.rand(3, device="cuda")
    first, second = end(recorder).draws
    assert first.seed == second.seed == 7 and first.offset == 0 < second.offset and first.device.type == "cuda"
    generator = torch.Generator("cuda").manual_seed(7)
    generator.set_offset(second.offset)
    assert torch.equal(torch.rand(3, device="cuda", generator=generator), x)


def test_stream_is_noted(recorder: Recorder) -> None:
    stream = torch.cuda.Stream()
    x = torch.ones(3, device="cuda")
    recorder.begin()
    x.sin()
    with torch.cuda.stream(stream):
        x.cos()
    sin, cos = end(recorder).operators
    assert (sin.stream, cos.stream) == (0, stream.stream_id)


def test_backward_s_thread_is_recorded(recorder: Recorder) -> None:
    x = torch.ones(3, device="cuda", requires_grad=True)
    recorder.begin()
    x.sin().sum().backward()
    tape = end(recorder)
    (cos,) = (each for each in tape.operators if each.name == "aten::cos")
    assert cos.thread != tape.thread  # that of backward


@pytest.mark.parametrize(
    ("non_blocking", "waits"),
    [(False, True), (True, False)],
)
def test_host_waits_for_a_copy_that_is_not_asked_to_go_on(recorder: Recorder, non_blocking: bool, waits: bool) -> None:
    x: Tensor = torch.ones(3, device="cuda")
    recorder.begin()
    x.to("cpu", non_blocking=non_blocking)
    x.clone()
    copy, clone = end(recorder).operators
    assert copy.waits == waits and not clone.waits
    torch.cuda.synchronize()
