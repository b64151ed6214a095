"""What does our allocator cost beside PyTorch's: step time, reserved memory and start-up, a process each, in turns?

``python -m benchmarks.allocators --workload reference_gpt --rounds 200 --variants plain,expandable,pages``
``python -m benchmarks.allocators --workload checkpointed_gpt,unet,changing_gpt --rounds 40 --apart``
``python -m benchmarks.allocators --rounds 60 --variants pages:auto,pages:capuchin --hbm 24GiB --apart``
``python -m benchmarks.allocators --workload resnet152 --compiled 0.4 --variants expandable,pages:auto --hbm 16GiB``
``python -m benchmarks.allocators --workload resnet152 --rounds 40 --starts 6 --variants expandable,expandable#2,pages``
``python -m benchmarks.allocators --variants expandable,pages:auto --hbm 29GiB --rounds 12 --turn 14``

An allocator is chosen before CUDA is initialised, so each variant is a process of its own; they take turns, step by
step unless told otherwise, so that a clock that drifts hits all of them. The GPU must hold all of them at once, or with
``--apart`` they run one after the other, and their times do not compare.

What clock a step finds may be another variant's doing, as a card at its power limit sets it by what it took before.
With ``--turn`` each trains so many steps at a time, of which the first four are not timed; a round is the median of the
others then.

"Reserved / live" is, of each step from the third on, the most that was mapped in it by the most that was alive in any
step so far: of what a long step needs, a short one after it leaves some idle. When the second step begins, what the
first had mapped is still there: the allocator's second period begins within it. With a policy that moves
(``pages:auto``) less is alive once there is a plan, so each step, the second included, is held against what was alive
in itself.

Two processes of the same variant differ: where the driver puts their pages, and what they have tuned, is another each
time they start. An interval within one start says nothing of that. With ``--starts`` all variants are started anew so
many times, and the ratio of each start is told; a variant beside itself (``expandable,expandable#2``) shows by how much
starts differ.

"Lost" is what the steps from the second one to the first round took beyond the median of the rounds: to learn the
program, to lay out its memory, and to try plans.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.alternate import Ratio, median_ratio, sm_clock
from benchmarks.turns import VARIANTS, Worker, environment, learning, moves
from torch_tiers.allocator.sizes import GiB

FASTEST = 0.05  # of the steps: where others use the host's cores, the GPU waits in most of them
SETTLING = 4  # steps of a turn, until the card's clocks are those of the variant
LIMITS = {"changing_gpt": 1.03}  # of reserved / live
LIMIT = 1.01
MOVING = 1.03  # with migration


@dataclass(frozen=True, slots=True)
class Row:
    """One variant; times in seconds, sizes in bytes, `ratio` to the first variant's steps.

    `start` counts how often all variants were started anew. `compiled` is the activation budget with which blocks were.
    `steps` are those of the rounds, of turns of `turn` steps the medians, `before` those between the first one and the
    rounds. `shares` is reserved / live of each step from the third on, with a policy that moves from the second on, or
    NaN without a GPU.
    """

    workload: str
    start: int
    turn: int
    compiled: float | None
    variant: str
    startup: float
    before: list[float]
    steps: list[float]
    ratio: Ratio
    allocated: int
    reserved: int
    host_us: float
    shares: list[float]


def compare(
    workload: str,
    variants: list[str],
    rounds: int,
    *,
    device: str = "cuda",
    tiny: bool = False,
    apart: bool = False,
    hbm: str | None = None,
    share: float | None = None,
    start: int = 0,
    turn: int = 1,
) -> list[Row]:
    """Let the variants take turns of `turn` steps for `rounds` rounds; `apart`, one after the other.

    With `share` each block is compiled, to save that share of its activations.
    """
    seen: dict[str, list[dict[str, float]]] = {}
    times: dict[str, list[float]] = {name: [] for name in variants}
    startups: dict[str, float] = {}
    for together in [[name] for name in variants] if apart else [variants]:
        workers: dict[str, Worker] = {}
        try:
            for name in together[start % len(together) :] + together[: start % len(together)]:
                workers[name] = Worker(workload, device, tiny, environment(name, hbm), share)
                startups[name] = workers[name].startup
                seen[name] = [workers[name].first]
            for name in together:
                seen[name] += [workers[name].step() for _ in range(learning(name))]
            for k in range(rounds):
                first = k % len(together)
                for name in together[first:] + together[:first]:
                    steps = [workers[name].step() for _ in range(turn)]
                    seen[name] += steps
                    times[name].append(median(one["step"] for one in steps[-max(turn - SETTLING, 1) :]))
        finally:
            for worker in workers.values():
                worker.close()
    shares = {name: reserved_to_live(measured, each=moves(name)) for name, measured in seen.items()}
    before = {name: [one["step"] for one in measured[1 : -rounds * turn]] for name, measured in seen.items()}
    seen = {name: measured[-rounds * turn :] for name, measured in seen.items()}
    return [
        Row(
            workload,
            start,
            turn,
            share,
            name,
            startups[name],
            before[name],
            times[name],
            median_ratio(times[name], times[variants[0]]),
            int(max(one["allocated"] for one in seen[name])),
            int(max(one["reserved"] for one in seen[name])),
            float(np.median([one["queued"] for one in seen[name]]) * 1e6),
            shares[name],
        )
        for name in variants
    ]


def reserved_to_live(steps: list[dict[str, float]], *, each: bool = False) -> list[float]:
    """For each step from the third on: the most reserved in it by the most that was alive in any step until then.

    With `each`, from the second on, by the most that was alive in that step.
    """
    alive = [one["allocated"] for one in steps]
    live = alive if each else np.maximum.accumulate(alive)
    return [one["reserved"] / most if most else float("nan") for one, most in zip(steps, live, strict=True)][
        1 if each else 2 :
    ]


def table(rows: list[Row]) -> str:
    """Rows as a Markdown table."""
    lines = [
        "| variant | start-up, first step | lost | step | ratio (95%) | allocated | reserved "
        "| reserved / live, worst | of the rounds | median |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = f"{row.ratio.median:.4f} ({row.ratio.low:.4f} to {row.ratio.high:.4f})"
        step, of_rounds = np.median(row.steps), row.shares[-len(row.steps) * row.turn :]
        lines.append(
            f"| {row.variant} | {row.startup:.1f} s | {sum(row.before) - step * len(row.before):.1f} s "
            f"| {step * 1e3:.1f} ms | {ratio} "
            f"| {row.allocated / GiB:.3f} GiB | {row.reserved / GiB:.3f} GiB "
            f"| {max(row.shares):.4f} | {max(of_rounds):.4f} | {np.median(row.shares):.4f} |"
        )
    return "\n".join(lines)


def by_start(rows: list[Row]) -> str:
    """The ratios of each start, of each variant but the first, as a Markdown table; at best: of its fastest steps."""
    lines = [
        "| variant | ratio, start by start | median (lowest to highest) | at best, the same |",
        "|---|---|---|---|",
    ]
    variants = list(dict.fromkeys(row.variant for row in rows))
    best = {(row.variant, row.start): float(np.quantile(row.steps, FASTEST)) for row in rows}
    for variant in variants[1:]:
        starts = {row.start: row.ratio.median for row in rows if row.variant == variant}
        each = ", ".join(f"{ratio:.4f}" for ratio in starts.values())
        at_best = [best[variant, start] / best[variants[0], start] for start in starts]
        lines.append(f"| {variant} | {each} | {_spread(list(starts.values()))} | {_spread(at_best)} |")
    return "\n".join(lines)


def _spread(ratios: list[float]) -> str:
    return f"{np.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allocators", description=__doc__)
    parser.add_argument("--workload", default="reference_gpt", help="one or more of benchmarks/workloads.py")
    parser.add_argument(
        "--variants",
        default="plain,pages",
        help=f"{', '.join(VARIANTS)}; with a policy that moves: pages:auto; again: plain#2",
    )
    parser.add_argument("--hbm", help="the budget of variants that move, such as 24GiB")
    parser.add_argument("--compiled", type=float, metavar="SHARE", help="compile blocks, with an activation budget")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--turn", type=int, default=1, help="steps that each trains at a time")
    parser.add_argument("--starts", type=int, default=1, help="how often all variants are started anew")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--apart", action="store_true", help="one variant after the other: their times do not compare")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.compiled is not None and not 0 <= arguments.compiled <= 1:
        parser.error("--compiled takes a share, from 0 to 1")
    if min(arguments.rounds, arguments.starts, arguments.turn) < 1:
        parser.error("--rounds, --starts and --turn take a number from 1 on")
    rows = []
    variants = arguments.variants.split(",")
    for workload in arguments.workload.split(","):
        limit = MOVING if any(map(moves, variants)) else LIMITS.get(workload, LIMIT)
        for start in range(arguments.starts):
            before = sm_clock()
            compared = compare(
                workload,
                variants,
                arguments.rounds,
                device=arguments.device,
                tiny=arguments.tiny,
                apart=arguments.apart,
                hbm=arguments.hbm,
                share=arguments.compiled,
                start=start,
                turn=arguments.turn,
            )
            rows += compared
            how = "" if arguments.compiled is None else f", blocks compiled with {arguments.compiled:g}"
            how += f", turns of {arguments.turn} steps" * (arguments.turn > 1)
            print(f"{workload}{how}, {arguments.rounds} rounds, SM clock {before} to {sm_clock()} MHz\n")
            print(table(compared))
            print(f"\nreserved / live is to be at most {limit} with pages\n", flush=True)
            if arguments.json:  # after each start: whoever cuts the run short keeps those that are over
                part = arguments.json.with_name(arguments.json.name + ".part")
                part.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
                part.replace(arguments.json)
        if arguments.starts > 1 and len(variants) > 1:
            print(by_start([row for row in rows if row.workload == workload]) + "\n", flush=True)


if __name__ == "__main__":
    main()
