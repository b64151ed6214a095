"""What is recorded of what runs on a CUDA device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.unit.migrator.tape.records import Taped, names
from torch_tiers.migrator.tape.recorder import Recorder

pytestmark = pytest.mark.gpu


def test_what_is_captured_into_a_graph_is_not_recorded(recorder: Recorder) -> None:
    x = torch.ones(3, device="cuda")
    x.sin().cos()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    taped = Taped(recorder)
    with torch.cuda.graph(graph):
        y = x.sin()
    x.cos()
    graph.replay()
    assert taped.find(y) is None
    recorded = names(recorder)
    assert "sin" not in recorded and recorded[-1] == "cos"  # before a capture PyTorch fills numbers of its own


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_graphed_callable_is_right(recorder: Recorder) -> None:
    model = nn.Linear(4, 4, device="cuda")
    x = torch.ones(2, 4, device="cuda", requires_grad=True)
    expected = model(x).detach().clone()
    recorder.begin()
    graphed = torch.cuda.make_graphed_callables(model, (x,))
    found = graphed(x)
    names(recorder)
    assert torch.equal(found, expected)


def test_backward_s_thread_is_recorded(recorder: Recorder) -> None:
    x = torch.ones(3, device="cuda", requires_grad=True)
    recorder.begin()
    x.sin().sum().backward()
    assert "cos" in names(recorder)
