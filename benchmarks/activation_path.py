"""How close a program under a budget comes to the same program without one, side by side in one process.

``python -m benchmarks.activation_path --workload reference_gpt --budgets 36GiB,28GiB,20GiB --moved --rounds 3``

Every round runs each variant once: it learns for a few steps, then some steps are timed as one. A
variant is ``plain``, a budget (its policy as configured), or ``moved``: everything that can move does.
Prints one table; ``--json FILE`` keeps the numbers.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

import torch_tiers as tiers
from benchmarks import workloads
from benchmarks.alternate import sm_clock
from benchmarks.hook_times import report
from torch_tiers.allocator.sizes import GiB, format_size

LEARNING = 8
"""Steps before timing: three at most are recorded, then the room settles."""


@dataclass(frozen=True, slots=True)
class Sitting:
    """One variant in one round; times in seconds, sizes in bytes, moved bytes per step."""

    variant: str
    step: float
    allocated: int
    reserved: int
    moved: dict[str, float]
    stalls: dict[str, Any]
    sm_clock: int | None


def run_variant(name: str, step: Callable[[], torch.Tensor], steps: int, arguments: dict[str, str] | None) -> Sitting:
    """Learn, then time `steps` steps, with a session of `arguments` or without."""
    cuda = torch.cuda.is_available()
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()

    def timed() -> float:
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for _ in range(steps):
            loss = step()
        loss.item()  # waits for the device
        return (time.perf_counter() - start) / steps

    def peaks() -> tuple[int, int]:
        return (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if cuda else (0, 0)

    moved: dict[str, float] = {}
    stalls: dict[str, Any] = {}
    if arguments is None:
        for _ in range(2):
            step()
        took = timed()
        allocated, reserved = peaks()
    else:
        with tiers.session(allocator="torch", **arguments) as session:
            for _ in range(LEARNING):
                step()
            before = session.stats()
            took = timed()
            after = session.stats()
            allocated, reserved = peaks()
        moved = {lane: (after["moved"][lane] - before["moved"][lane]) / steps for lane in after["moved"]}
        stalls = after["stalls"]
    return Sitting(name, took, allocated, reserved, moved, stalls, sm_clock())


def link_speed() -> tuple[float, float]:
    """Bytes per second of one pinned 1 GiB copy, out and back; the best of five."""
    host = torch.empty(GiB, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(GiB, dtype=torch.uint8, device="cuda")
    speeds = []
    for target, source in ((host, device), (device, host)):
        best = float("inf")
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        speeds.append(GiB / best)
    return speeds[0], speeds[1]


def table(sittings: list[Sitting]) -> str:
    """Medians over the rounds, one line a variant; the ideal is ``plain``."""
    by_variant: dict[str, list[Sitting]] = {}
    for sitting in sittings:
        by_variant.setdefault(sitting.variant, []).append(sitting)
    ideal = median(s.step for s in by_variant["plain"])
    head = (
        f"{'variant':<12}{'step ms':>9}{'of ideal':>9}{'alloc GiB':>10}{'resv GiB':>9}{'r/a':>6}"
        f"{'out GiB':>8}{'back GiB':>9}  SM MHz"
    )
    lines = [head]
    for name, rounds in by_variant.items():
        step = median(s.step for s in rounds)
        alloc, resv = max(s.allocated for s in rounds), max(s.reserved for s in rounds)
        out = median(s.moved.get("d2h", 0) for s in rounds)
        back = median(s.moved.get("h2d", 0) for s in rounds)
        clocks = "/".join(str(s.sm_clock) for s in rounds)
        lines.append(
            f"{name:<12}{step * 1e3:>9.1f}{ideal / step:>9.3f}{alloc / GiB:>10.2f}{resv / GiB:>9.2f}"
            f"{resv / alloc if alloc else 0:>6.3f}{out / GiB:>8.2f}{back / GiB:>9.2f}  {clocks}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workload", default="reference_gpt", choices=["reference_gpt", "long_context_gpt", "resnet152"]
    )
    parser.add_argument("--tiny", action="store_true", help="the small variant, on a CPU")
    parser.add_argument("--budgets", default="", help="comma-separated sizes")
    parser.add_argument("--moved", action="store_true", help="also with everything moved")
    parser.add_argument("--dram", default="64GiB")
    parser.add_argument("--rounds", type=int, default=3, help="0: no more than what else is asked for")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--hooks", action="store_true", help="also measure the host time of the hooks, by `hook_times`")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    workload = getattr(workloads, options.workload)("cuda" if cuda else "cpu", tiny=options.tiny)
    variants: dict[str, dict[str, str] | None] = {"plain": None}
    for budget in filter(None, options.budgets.split(",")):
        variants[budget] = {"hbm": budget, "dram": options.dram}
    if options.moved:
        variants["moved"] = {"policy": "move", "dram": options.dram}
    sittings: list[Sitting] = []
    for number in range(options.rounds):
        names = list(variants)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            sittings.append(run_variant(name, workload.step, options.steps, variants[name]))
            last = sittings[-1]
            print(
                f"round {number} {name}: {last.step * 1e3:.1f} ms, reserved {format_size(last.reserved)}",
                last.stalls,
                flush=True,
            )
    if cuda:
        out, back = link_speed()
        print(f"link: out {out / 1e9:.1f} GB/s, back {back / 1e9:.1f} GB/s")
    if options.hooks:
        report(options.dram)
    if sittings:
        print(table(sittings))
    if options.json:
        options.json.write_text(json.dumps([asdict(s) for s in sittings], indent=1))


if __name__ == "__main__":
    main()
