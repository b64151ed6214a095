"""What a recorded iteration takes the device is what it takes without our events between its kernels."""

from __future__ import annotations

import itertools
from statistics import median

import pytest
import torch
from torch import Tensor

from torch_tiers.allocator.native.copy import lane
from torch_tiers.migrator.streams.cuda import CudaCompute
from torch_tiers.migrator.telemetry.counters import Counters

pytestmark = pytest.mark.gpu

KERNELS = 300
HELD = 10_000_000  # cycles, some milliseconds: the host is ahead of the device


@pytest.fixture
def compute() -> CudaCompute:
    return CudaCompute(torch.device("cuda", 0), Counters(), lane.load())


def alone(x: Tensor) -> float:
    """Seconds of the kernels with nothing between them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HELD)
    start.record()
    for _ in range(KERNELS):
        x.add_(1)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def recorded(compute: CudaCompute, x: Tensor) -> float:
    """Seconds of the kernels as a meter tells them, with a position after each."""
    torch.cuda.synchronize()
    meter = compute.meter(held=True)
    for _ in range(KERNELS):
        x.add_(1)
        meter.tick(0)
    return float(meter.finish(0, [0] * (KERNELS + 1)).seconds)


@pytest.mark.parametrize("numel", [1 << 10, 1 << 20, 1 << 23], ids=["small", "middle", "large"])
def test_a_kernel_takes_as_long_with_a_position_behind_it_as_without(compute: CudaCompute, numel: int) -> None:
    x = torch.zeros(numel, device="cuda")
    rounds = [(alone(x), recorded(compute, x)) for _ in range(5)]
    plain, seen = (median(times) for times in zip(*rounds, strict=True))
    each = [f"{1e6 * time / KERNELS:.2f} us" for time in itertools.chain(*rounds)]
    assert seen == pytest.approx(plain, rel=0.1), f"{each}, an event {1e6 * compute.mark_seconds:.2f} us"
