"""Which kernels of a step take longer than the plain program's? Two variants run in turns, step by step, then profiled.

``python -m benchmarks.kernels --workload reference_gpt --hbm 29.15GiB``
``python -m benchmarks.kernels --workload resnet152 --variants expandable,expandable#2``

The variants are those of `benchmarks.turns`, a process each: the GPU must hold both. Steps of the rounds tell what
each takes; profiled ones, which take longer, where that goes: the kernels by name, and what lies between kernels, where
the GPU starts the next, or waits for the host. It does among the first of a step, which begins with nothing queued.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median

from benchmarks.alternate import median_ratio, sm_clock
from benchmarks.turns import Span, Worker, environment, learning

Steps = Sequence[Sequence[Span]]
"""The kernels of some steps, in order."""

COPY = "Memcpy"  # lanes do that beside kernels
FIRST = 8  # kernels, until when the host may be behind the GPU
SHOWN = 12


def by_name(steps: Steps) -> dict[str, tuple[int, float]]:
    """How often a kernel runs in a step, and how many microseconds it takes there in all; medians over the steps."""
    counts = [Counter(name for name, _, _ in step) for step in steps]
    took: list[dict[str, float]] = [defaultdict(float) for _ in steps]
    for step, sums in zip(steps, took, strict=True):
        for name, start, end in step:
            sums[name] += end - start
    names = {name: None for count in counts for name in count}
    return {name: (int(median(c[name] for c in counts)), median(t[name] for t in took)) for name in names}


def between(step: Sequence[Span]) -> tuple[float, float]:
    """Microseconds in which no kernel ran, among the first few of a step and after them."""
    gaps, reached = [], float("-inf")
    kernels = [span for span in step if not span[0].startswith(COPY)]
    for one, other in pairwise(kernels):
        reached = max(reached, one[2])
        gaps.append(max(0.0, other[1] - reached))
    return sum(gaps[:FIRST]), sum(gaps[FIRST:])


def table(profiles: Mapping[str, Steps]) -> Iterator[str]:
    """What a step of the second variant has more of than one of the first, as a Markdown table."""
    base, other = (by_name(steps) for steps in profiles.values())
    yield f"| us of a step | {' | '.join(profiles)} | more |"
    yield "|---|---|---|---|"
    more = {name: other.get(name, (0, 0.0))[1] - base.get(name, (0, 0.0))[1] for name in base | other}
    shown = sorted(more, key=lambda name: -abs(more[name]))[:SHOWN]
    for name in shown:
        cells = " | ".join(f"{count} x, {took:.0f}" for count, took in (d.get(name, (0, 0.0)) for d in (base, other)))
        yield f"| {_short(name)} | {cells} | {more[name]:+.0f} |"
    rest = [[took for name, (_, took) in d.items() if name not in shown] for d in (base, other)]
    yield _line("all other kernels", *map(sum, rest))
    gaps = [[median(parts) for parts in zip(*map(between, steps), strict=True)] for steps in profiles.values()]
    yield _line(f"between the first {FIRST} kernels", *(first for first, _ in gaps))
    yield _line("between the others", *(later for _, later in gaps))


def _line(what: str, base: float, other: float) -> str:
    return f"| {what} | {base:.0f} | {other:.0f} | {other - base:+.0f} |"


def _short(name: str) -> str:
    """A kernel's name without what all have in common, and without the ends of long ones."""
    return name.replace("void ", "").replace("at::native::", "").replace("|", "")[:72]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="reference_gpt", help="one of benchmarks/workloads.py")
    parser.add_argument("--variants", default="expandable,pages:auto", help="two; see benchmarks/turns.py")
    parser.add_argument("--hbm", help="the budget of variants that move, such as 29.15GiB")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--profiled", type=int, default=7, help="steps of each variant")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    names = options.variants.split(",")
    if len(set(names)) != 2 or min(options.rounds, options.profiled) < 1:
        parser.error("--variants takes two names, --rounds and --profiled numbers from 1 on")
    workers: dict[str, Worker] = {}
    steps: dict[str, list[float]] = {name: [] for name in names}
    profiles: dict[str, list[list[Span]]] = {name: [] for name in names}
    try:
        for name in names:
            workers[name] = Worker(options.workload, options.device, options.tiny, environment(name, options.hbm))
        for name in names:
            for _ in range(learning(name)):
                workers[name].step()
        for k in range(options.rounds + options.profiled):
            for name in names[:: 1 if k % 2 else -1]:
                if k < options.rounds:
                    steps[name].append(workers[name].step()["step"])
                else:
                    profiles[name].append(workers[name].kernels())
                    workers[name].step()  # one after a profile takes longer
    finally:
        for worker in workers.values():
            worker.close()
    first, second = names
    ratio = median_ratio(steps[first], steps[second])
    medians = ", ".join(f"{name} {median(steps[name]) * 1e3:.2f} ms" for name in names)
    print(f"{options.workload}, {options.rounds} rounds: {medians}, SM clock {sm_clock()} MHz")
    print(f"{first} / {second}: {ratio.median:.4f} ({ratio.low:.4f} to {ratio.high:.4f})\n")
    print("\n".join(table(profiles)))


if __name__ == "__main__":
    main()
