"""What operators take a GPU, one by one: not what it waits for between them."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from torch_tiers.migrator.tape.clock import OperatorTimes
from torch_tiers.migrator.tape.recorder import Recorder

pytestmark = pytest.mark.gpu

PAUSE = 0.02  # seconds


def begun(recorder: Recorder) -> OperatorTimes:
    times = recorder.clock.begin(0, 0)
    assert times is not None
    return times


def end(times: OperatorTimes) -> list[float]:
    torch.cuda.synchronize()
    return times.end()


@pytest.fixture
def large() -> Tensor:
    """An operand of products that take the device more than a millisecond each."""
    made = torch.ones(8192, 8192, device="cuda")
    made @ made
    torch.cuda.synchronize()
    return made


def alone(large: Tensor) -> float:
    """Seconds of one product."""
    start, over = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    large @ large
    over.record()
    torch.cuda.synchronize()
    return start.elapsed_time(over) / 1e3


def test_each_stretch_has_the_operators_that_ran_in_it(recorder: Recorder, large: Tensor) -> None:
    once = alone(large)
    times = begun(recorder)
    large @ large
    times.tick(0)
    large @ large
    large @ large
    times.tick(0)
    assert end(times) == [pytest.approx(once, rel=0.2), pytest.approx(2 * once, rel=0.2), 0]


def test_a_late_host_counts_for_nothing(recorder: Recorder) -> None:
    x = torch.ones(3, device="cuda")
    times = begun(recorder)
    for _ in range(3):
        x.sin()
        time.sleep(PAUSE)
    (seconds,) = end(times)
    assert 0 < seconds < PAUSE


def test_a_wait_for_another_stream_counts_for_nothing_nor_what_runs_there(recorder: Recorder, large: Tensor) -> None:
    """Where the other is a collective's, it waits for other ranks."""
    other, x = torch.cuda.Stream(), torch.ones(3, device="cuda")
    once = alone(large)
    times = begun(recorder)
    with torch.cuda.stream(other):
        for _ in range(3):
            large @ large
    torch.cuda.current_stream().wait_stream(other)
    x.sin()
    (seconds,) = end(times)
    assert 0 < seconds < once


def test_backward_s_thread_is_timed_whether_operators_are_recorded_or_not(recorder: Recorder, large: Tensor) -> None:
    w = large.clone().requires_grad_()
    once = alone(large)
    times = begun(recorder)
    recorder.begin()
    y = (w @ large).sum()
    recorder.stop()
    y.backward()
    (seconds,) = end(times)
    assert seconds > 1.8 * once


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "with a graph break"])
@pytest.mark.filterwarnings("default:TensorFloat32")
@pytest.mark.filterwarnings("default:The .grad attribute")  # which Dynamo asks for, and hides
def test_what_is_compiled_counts_as_a_whole(recorder: Recorder, backend: str, breaks: bool) -> None:
    """In backward, too. Its kernels are launched by no operator."""
    layers = nn.ModuleList(nn.Linear(4096, 4096) for _ in range(2)).to("cuda", torch.bfloat16)

    def forward(x: Tensor) -> Tensor:
        x = layers[0](x)
        if breaks:
            torch._dynamo.graph_break()
        return layers[1](nn.functional.gelu(x)).sum()

    compiled = torch.compile(forward, backend=backend)
    x = torch.ones(65536, 4096, device="cuda", dtype=torch.bfloat16)
    compiled(x).backward()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    compiled(x).backward()
    torch.cuda.synchronize()
    both = time.perf_counter() - begin
    times = begun(recorder)
    compiled(x).backward()
    (seconds,) = end(times)
    assert 0.6 * both < seconds < 1.1 * both


def test_a_collective_counts_for_nothing(recorder: Recorder) -> None:
    """It takes as long as the slowest rank."""
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        x = torch.ones(3, device="cuda")
        torch.distributed.all_reduce(x)
        times = begun(recorder)
        torch.distributed.all_reduce(x)
        assert end(times) == [0]
    finally:
        torch.distributed.destroy_process_group()


def test_a_batch_that_is_copied_to_the_device_counts(recorder: Recorder) -> None:
    batch = torch.ones(1 << 26).pin_memory()
    batch.to("cuda", non_blocking=True)
    times = begun(recorder)
    batch.to("cuda", non_blocking=True)
    (seconds,) = end(times)
    assert seconds > 1e-3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_one_gpu_is_timed_after_another(recorder: Recorder) -> None:
    for device in (0, 1, 0):
        with torch.cuda.device(device):
            x = torch.ones(1 << 28, device="cuda")
            x.sin()
            times = recorder.clock.begin(device, 0)
            assert times is not None
            x.sin()
            assert torch.cuda.current_device() == device
            torch.cuda.synchronize()
            (seconds,) = times.end()
            assert seconds > 1e-4


def test_what_is_captured_into_a_graph_is_not_timed(recorder: Recorder) -> None:
    x = torch.ones(3, device="cuda")
    x.sin()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), begun(recorder)
    with torch.cuda.graph(graph):
        y = x.sin()
    graph.replay()
    end(times)
    assert torch.equal(y, x.sin())
