"""What the lanes and the compute stream do during one step, from PyTorch's profiler.

``python -m benchmarks.lane_profile --workload reference_gpt --policy move``

Prints, per lane, how long it was busy, at what speed, and its longest gaps; and the same for kernels.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

import torch_tiers as tiers
from benchmarks import workloads
from benchmarks.activation_path import LEARNING

Span = tuple[float, float]
"""Start and end, in microseconds."""


@dataclass(frozen=True, slots=True)
class Use:
    """How one engine of the GPU was used between the first and the last event of all."""

    busy: float
    gaps: tuple[Span, ...]


def use(spans: list[Span], start: float, end: float) -> Use:
    """Time covered by `spans` within ``[start, end)``, and what is between them, longest first."""
    busy, reached, gaps = 0.0, start, []
    for low, high in sorted(spans):
        if low > reached:
            gaps.append((reached, low))
        busy += max(0.0, high - max(low, reached))
        reached = max(reached, high)
    if end > reached:
        gaps.append((reached, end))
    return Use(busy, tuple(sorted(gaps, key=lambda gap: gap[0] - gap[1])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workload", default="reference_gpt", choices=["reference_gpt", "long_context_gpt", "resnet152"]
    )
    parser.add_argument("--policy", default="move")
    parser.add_argument("--hbm")
    parser.add_argument("--dram", default="64GiB")
    options = parser.parse_args()
    workload = getattr(workloads, options.workload)("cuda")
    with tiers.session(allocator="torch", policy=options.policy, hbm=options.hbm, dram=options.dram) as session:
        for _ in range(LEARNING):
            workload.step()
        before = session.stats()["moved"]
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as record:
            workload.step()
            torch.cuda.synchronize()
        moved = {lane: nbytes - before[lane] for lane, nbytes in session.stats()["moved"].items()}
    spans: dict[str, list[Span]] = {"d2h": [], "h2d": [], "kernels": []}
    for event in record.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        lane = "d2h" if "DtoH" in event.name else "h2d" if "HtoD" in event.name else "kernels"
        if "Memset" not in event.name and "DtoD" not in event.name:
            spans[lane].append((event.time_range.start, event.time_range.end))
    start = min(low for lane in spans.values() for low, _ in lane)
    end = max(high for lane in spans.values() for _, high in lane)
    print(f"{options.workload}, policy {options.policy}, hbm {options.hbm}: span {(end - start) / 1e3:.1f} ms")
    for lane, of_lane in spans.items():
        used = use(of_lane, start, end)
        speed = f", {moved[lane] / used.busy / 1e3:.1f} GB/s" if lane in moved and used.busy else ""
        longest = ", ".join(f"{(low - start) / 1e3:.1f}+{(high - low) / 1e3:.2f}" for low, high in used.gaps[:8])
        print(f"  {lane:8} busy {used.busy / 1e3:7.1f} ms in {len(of_lane)}{speed}; longest gaps at (ms): {longest}")


if __name__ == "__main__":
    main()
