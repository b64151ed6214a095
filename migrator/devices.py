"""What stands for a device: its compute stream, its two lanes and its budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from allocator.native import lane
from migrator.counters import Counters
from migrator.lanes import Compute, Lane
from migrator.lanes.cuda import CudaCompute, CudaLane
from migrator.lanes.host import HostCompute, HostLane
from migrator.lanes.native import NativeCompute, NativeLane


@dataclass(frozen=True, slots=True)
class Device:
    """What all threads share that train on one device.

    Attributes
    ----------
    budget : int
        HBM that the process may take, in bytes.
    holes : int
        Bytes of it in segments of PyTorch's allocator that were there before, in use in part: no larger request fits.
    """

    compute: Compute
    out: Lane
    back: Lane
    budget: int
    holes: int = 0


def open_device(device: torch.device, counters: Counters, budget: int, lap: Callable[[], int] | None = None) -> Device:
    """Make a device's streams and lanes; with the native library where it was built.

    `lap` tells a GPU's peak since it was last called, where PyTorch's allocator is not the one to ask.
    """
    if device.type != "cuda":
        return Device(HostCompute(counters), HostLane("d2h", counters), HostLane("h2d", counters), budget)
    library = lane.load()
    if library is None:
        out, back = (CudaLane(device, name, counters) for name in ("d2h", "h2d"))
        return Device(CudaCompute(device, counters, lap), out, back, budget)
    out, back = (NativeLane(device, name, counters, library) for name in ("d2h", "h2d"))
    return Device(NativeCompute(device, counters, library, lap), out, back, budget)


def holes(device: torch.device) -> int:
    """What PyTorch's allocator reserves on a GPU and cannot give back, for blocks that are in use here and there.

    Next to nothing, but where segments of fixed size are there already: a session that opens in the middle of a run.
    """
    if torch.cuda.is_current_stream_capturing():
        return 0  # nothing may be given back now
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def has_tiers(device: torch.device) -> bool:
    """Whether tensors on `device` move: those of GPUs, or of the host where there is no GPU."""
    return device.type == "cuda" or (device.type == "cpu" and not torch.cuda.is_available())


def name_of(device: torch.device) -> str:
    """What reports call it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
