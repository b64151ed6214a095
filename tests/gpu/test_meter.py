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

TICKS, KERNELS = 100, 8
HELD = 20_000_000  # cycles, some ten milliseconds: the host is ahead of the device


@pytest.fixture
def x() -> Tensor:
    return torch.zeros(1 << 22, device="cuda")


@pytest.fixture
def compute(x: Tensor) -> CudaCompute:
    """Of a device whose allocator is at work."""
    return CudaCompute(x.device, Counters(), lane.load())


def alone(x: Tensor) -> float:
    """Seconds of the kernels with nothing between them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HELD)
    start.record()
    for _ in range(TICKS * KERNELS):
        x.add_(1)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def recorded(compute: CudaCompute, x: Tensor) -> float:
    """Seconds of the kernels as a meter tells them, with a position after every few."""
    torch.cuda.synchronize()
    meter = compute.meter(held=True)
    for _ in range(TICKS):
        for _ in range(KERNELS):
            x.add_(1)
        meter.tick(0)
    return float(meter.finish(0, [0] * (TICKS + 1)).seconds)


def test_kernels_take_as_long_with_positions_between_them_as_without(compute: CudaCompute, x: Tensor) -> None:
    rounds = [(alone(x), recorded(compute, x)) for _ in range(5)]
    plain, seen = (median(times) for times in zip(*rounds, strict=True))
    each = [f"{1e6 * time / TICKS:.1f} us" for time in itertools.chain(*rounds)]
    assert seen == pytest.approx(plain, rel=0.05), f"{each}, {compute.mark_times}"


def test_positions_with_nothing_between_them_take_no_time(compute: CudaCompute, x: Tensor) -> None:
    torch.cuda.synchronize()
    meter = compute.meter(held=True)
    for _ in range(TICKS):
        meter.tick(0)
    assert float(meter.finish(0, [0] * (TICKS + 1)).seconds) < 1e-4


def test_an_event_takes_a_stream_some_microseconds(compute: CudaCompute) -> None:
    assert all(0 < seconds < 1e-4 for seconds in compute.mark_times)
