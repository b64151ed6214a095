"""What recomputations take where backward asks for them, beside what their trials took, which plans count on.

``python -m benchmarks.in_place --workload reference_gpt --hbm 29.15GiB --steps 12``

Trains until the plans stay, and then times every recomputation of so many steps: on a GPU between two events of its
stream, so with what it waits for if an input moved. A plan that recomputes is as good as its trials are true.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count as count_from
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import torch_tiers as tiers
from benchmarks import workloads
from benchmarks.settling import PLANNING, plans
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.engine import native
from torch_tiers.migrator.plan import Plan
from torch_tiers.migrator.recompute import dropped
from torch_tiers.migrator.recompute.replays import Replay, operators_of
from torch_tiers.migrator.trace import Trace
from torch_tiers.places import cache_directory
from torch_tiers.session import Session

LEAST = 12  # steps until plans stay

Kind = tuple[str, int]
"""An operation, and the bytes of what it makes."""


@dataclass(slots=True)
class Row:
    """All recomputations of a kind; times in seconds, of one."""

    trials: list[float] = field(default_factory=list)  # of each tensor that the plan recomputes
    in_place: list[float] = field(default_factory=list)  # of each time that one was


class Timed:
    """The recomputations of a step, each between two points of its stream, or of the host's time without a GPU."""

    def __init__(self) -> None:
        self._run = dropped.run
        self._spans: list[tuple[Kind, Any, Any]] = []

    def run(self, what: Replay, peek: dropped.Peek) -> list[Tensor]:
        """Recompute, and take the time."""
        start = _now()
        made = self._run(what, peek)
        nbytes = sum(each.untyped_storage().nbytes() for each in made)
        self._spans.append(((operators_of(what.names[0]), nbytes), start, _now()))
        return made

    def take(self) -> Iterator[tuple[Kind, float]]:
        """What there was since, and how many seconds each took. The device has passed all of it."""
        spans, self._spans = self._spans, []
        return ((kind, _seconds(start, end)) for kind, start, end in spans)


@contextmanager
def without_shortcut() -> Iterator[None]:
    """Have sessions that open meanwhile make again through Python all that was dropped: in C++ nobody can time it."""
    tensors = native.load(native.MODULE.build(cache_directory()))
    with mock.patch.object(tensors, "hooks", lambda saver, place, least: (saver.pack, saver.unpack)):
        yield


@contextmanager
def timed() -> Iterator[Timed]:
    """Have every recomputation timed."""
    watch = Timed()
    with mock.patch.object(dropped, "run", watch.run):
        yield watch


def _now() -> Any:
    if not torch.cuda.is_initialized():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    return float(end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3)


def of_trials(plan: Plan, trace: Trace) -> Iterator[tuple[Kind, float]]:
    """What each tensor that the plan recomputes took when it was tried."""
    keys = frozenset(plan.recompute)
    lives = {life.ident: life.nbytes for life in trace.lifetimes}
    for ident in {site.storage for site in trace.sites if site.key in keys}:
        recipe = trace.recipes[ident]
        yield (recipe.op, lives[ident]), recipe.seconds


def measure(session: Session, step: Callable[[], Tensor], steps: int) -> dict[Kind, Row]:
    """Train until the plans stay, and so many steps more; the rows of these."""
    patience = time.monotonic() + PLANNING
    for count in count_from(1):
        step()
        now = plans(session)
        if count >= LEAST and ((now.now and now.stay) or time.monotonic() > patience):
            break
    rows: dict[Kind, Row] = defaultdict(Row)
    saver = session.runtime.saver()
    for mover in saver.armed_movers if saver is not None else []:
        for plan, trace in zip(mover.learner.plans, mover.learner.traces, strict=True):
            for kind, seconds in of_trials(plan, trace):
                rows[kind].trials.append(seconds)
    with timed() as watch:
        for _ in range(steps):
            step()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            for kind, seconds in watch.take():
                rows[kind].in_place.append(seconds)
    return rows


def table(rows: dict[Kind, Row], steps: int) -> Iterable[str]:
    """The rows as a Markdown table, what costs a step most first, and their sum."""
    yield "| operation | MiB | in a step | trial, us | in place, us | trials, ms a step | in place, ms a step |"
    yield "|---|---|---|---|---|---|---|"
    whole = np.zeros(2)
    for (op, nbytes), row in sorted(rows.items(), key=lambda pair: -sum(pair[1].in_place)):
        both = np.array([sum(row.trials), sum(row.in_place) / steps])
        whole += both
        trial, in_place = (f"{np.median(times) * 1e6:.1f}" if times else "-" for times in (row.trials, row.in_place))
        count = f"{len(row.in_place) / steps:g}"
        sums = " | ".join(f"{seconds * 1e3:.2f}" for seconds in both)
        yield f"| {op} | {nbytes / MiB:.1f} | {count} | {trial} | {in_place} | {sums} |"
    yield f"| all | | | | | {' | '.join(f'{seconds * 1e3:.2f}' for seconds in whole)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workload", default="reference_gpt", choices=["reference_gpt", "long_context_gpt", "resnet152"]
    )
    parser.add_argument("--tiny", action="store_true", help="the small variant, on a CPU")
    parser.add_argument("--allocator", default="pages", choices=["pages", "torch"])
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--hbm", help="the budget, such as 29.15GiB")
    parser.add_argument("--dram", default="64GiB")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments = {"policy": options.policy, "dram": options.dram, "allocator": options.allocator}
    if options.hbm:
        arguments["hbm"] = options.hbm
    # Before CUDA is initialised, for the allocator's sake.
    with without_shortcut(), tiers.session(**arguments) as session:
        workload = getattr(workloads, options.workload)(device, tiny=options.tiny)
        rows = measure(session, workload.step, options.steps)
        now = plans(session)
    for plan in now.now:
        does = f"{len(plan.recompute)} recomputed, {plan.moved_bytes / MiB:.0f} MiB moved"
        print(f"{options.workload}, {options.policy}: {does}{'' if now.stay else '; the plans had not settled'}\n")
    print("\n".join(table(rows, options.steps)))


if __name__ == "__main__":
    main()
