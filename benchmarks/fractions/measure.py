"""Measuring one method in this process: warm up or learn until nothing changes, then time some steps."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import torch_tiers as tiers
from benchmarks.alternate import host_us, sm_clock
from benchmarks.counts import per_step
from benchmarks.fractions.cells import Method
from benchmarks.fractions.methods import Step, blocks_of, prepare
from benchmarks.settling import PLANNING, plans
from benchmarks.workloads import Workload
from torch_tiers.assembly import Session
from torch_tiers.migrator.simulator import simulate

COMPARED = 8  # losses, of the first steps
STEADY = 4  # steps after which plans that stayed as they are count as settled
AGAIN = 3  # times that timing begins anew, as plans changed meanwhile: to begin with others costs steps of seconds
FEWEST = 3  # steps that are timed, however slow
AMPLE = "1TiB"  # of HBM, where none is enforced


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long to measure, in steps.

    Attributes
    ----------
    warmup, timed
        Of a method that learns nothing.
    learning
        At least and at most, of one that does.
    settled
        Timed of one that does.
    seconds
        After which no further step is timed, beyond the first few.
    warm
        Seconds for which a GPU trains right before a step is timed: a cool one has clocks that it does not keep. The
        plain GPT took 263 to 265 ms a step at first, 268 to 269 from its twelfth second on. However long a method has
        compiled or learned: in some of that time the device does nothing.
    """

    warmup: int = 2
    timed: int = 6
    learning: tuple[int, int] = (12, 128)
    settled: int = 10
    seconds: float = 15.0
    warm: float = 12.0


@dataclass(slots=True)
class Bench:
    """Measures methods on one workload.

    Attributes
    ----------
    build
        Makes the workload afresh, so that every method begins with the same weights.
    dram
        What tiers may take of it.
    trl
        The file that has ``OffloadActivations``.
    runs
        Directory for the run directories of our measurements, by method and budget; without it they leave none.
    """

    build: Callable[[], Workload]
    dram: str = "64GiB"
    trl: Path | None = None
    runs: Path | None = None
    lengths: Lengths = field(default_factory=Lengths)
    _probed: dict[int, int] = field(default_factory=dict)  # peak by the number of checkpointed blocks
    _blocks: int | None = None

    def measure(self, method: Method, hbm: int | None = None) -> dict[str, Any]:
        """Train with `method` and tell what it took.

        Parameters
        ----------
        hbm
            The budget in bytes, None for all there is.
        """
        clean()
        blocks = None
        if method.kind == "checkpoint-k":
            budget = _all_memory() if hbm is None else hbm
            blocks = fewest(partial(self._peak, method), self._count_blocks(), budget)
        try:
            measured = self._train(method, hbm, blocks)
        except torch.OutOfMemoryError:
            if blocks is None or hbm is not None or blocks == self._count_blocks():
                raise
            measured = {}
        if not measured:  # outside of `except`, whose traceback holds what there was
            assert blocks is not None
            clean()
            blocks += 1  # two steps had room for fewer, and fragments took it
            measured = self._train(method, hbm, blocks)
        if method.allocator == "torch":
            clean()  # another process may be next
        return measured | ({} if blocks is None else {"blocks": blocks})

    def _train(self, method: Method, hbm: int | None, blocks: int | None) -> dict[str, Any]:
        with ExitStack() as stack:
            session = self._session(method, hbm, stack)
            workload = self.build()
            step = prepare(method, workload, stack, blocks=blocks, trl=self.trl)
            measured = self._run(step, session if method.ours else None) | {"batch": workload.batch}
            if session is not None:
                measured |= _hbm_peak(method, session)
        return measured | (_predicted(session) if session is not None and method.ours else {})

    def _session(self, method: Method, hbm: int | None, stack: ExitStack) -> Session | None:
        if method.ours:
            arguments: dict[str, Any] = {
                "allocator": method.allocator,
                "policy": method.policy,
                "dram": self.dram,
                "hbm": hbm,
                "plan_cache": False,  # what one cell learned is no other's
            }
            if self.runs is not None:
                arguments["run"] = _unused(self.runs / f"{method.name.replace(':', '-')}-{hbm or 'all'}")
            return stack.enter_context(tiers.session(**arguments))
        if torch.cuda.is_available() or method.kind != "ideal":
            return None
        # Nobody counts host memory but tiers.
        return stack.enter_context(tiers.session(allocator="torch", policy="keep", hbm=AMPLE, dram=self.dram))

    def _run(self, step: Step, session: Session | None) -> dict[str, Any]:
        losses: list[float] = []
        timed = partial(_timed, step, losses)
        settled = True
        if session is None:
            for _ in range(self.lengths.warmup):
                timed()
            learning, count = self.lengths.warmup, self.lengths.timed
        else:
            learning, settled = _learn(session, timed, *self.lengths.learning)
            count = self.lengths.settled
        if torch.cuda.is_available():
            begun = time.perf_counter()
            while time.perf_counter() - begun < self.lengths.warm:
                timed()
        steps, before = self._time(timed, count, session)
        measured: dict[str, Any] = {
            "steps": steps,
            "losses": losses[:COMPARED],
            "learning": learning,
            "warm": self.lengths.warm,
            "settled": settled,
            "sm_clock": sm_clock(),
            "host_us": host_us(),
            "torch": torch.__version__,
            **peaks(),
        }
        if session is not None and before is not None:
            measured |= per_step(before, session.stats(), len(steps))
        return measured

    def _time(
        self, timed: Callable[[], float], count: int, session: Session | None
    ) -> tuple[list[float], dict[str, Any] | None]:
        """So many steps of the same plans, as far as plans stay at all, and what the session told before them."""
        for left in reversed(range(AGAIN + 1)):
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            before, held = (None, None) if session is None else (session.stats(), plans(session).now)
            steps: list[float] = []
            while len(steps) < count and (len(steps) < FEWEST or sum(steps) < self.lengths.seconds):
                steps.append(timed())
                if left and session is not None and plans(session).now != held:
                    break
            else:
                break
            for _ in range(STEADY):
                timed()
        return steps, before

    def _peak(self, method: Method, blocks: int) -> int:
        """Most bytes reserved with so many blocks checkpointed; more than there are where that does not fit."""
        if blocks not in self._probed:
            try:
                with ExitStack() as stack:
                    step = prepare(method, self.build(), stack, blocks=blocks, trl=None)
                    for _ in range(2):  # the first makes the optimizer's state
                        step().item()
                    self._probed[blocks] = peaks()["reserved"]
            except torch.OutOfMemoryError:
                self._probed[blocks] = sys.maxsize
            step = None
            clean()
        return self._probed[blocks]

    def _count_blocks(self) -> int:
        if self._blocks is None:
            self._blocks = len(blocks_of(self.build()))
        return self._blocks


def fewest(peak: Callable[[int], int], blocks: int, budget: int) -> int:
    """How few blocks, of `blocks`, have to be checkpointed for `peak` to be within the budget; all if none suffice.

    Parameters
    ----------
    peak
        Of so many; the more, the lower.
    """
    low, high = 0, blocks  # more than `low` are needed: the budget is less than the plain program takes
    if peak(high) > budget:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if peak(middle) > budget:
            low = middle
        else:
            high = middle
    return high


def _timed(step: Step, losses: list[float]) -> float:
    start = time.perf_counter()
    losses.append(step().item())  # waits for the device
    return time.perf_counter() - start


def _learn(session: Session, timed: Callable[[], float], least: int, most: int) -> tuple[int, bool]:
    """Train until the plans stay as they are; how many steps that took, and whether they do."""
    held = plans(session).now
    steady, patience = 0, time.perf_counter() + PLANNING
    for count in range(1, most + 1):
        timed()
        told = plans(session)
        while plans(session).coming and count >= least and time.perf_counter() < patience:
            time.sleep(0.02)  # steps without the plan that is being made would teach nothing
        steady = steady + 1 if told.now == held and not plans(session).coming else 0
        held = told.now
        if count >= least and steady >= STEADY and told.stay:
            return count, True
    return most, False


def _predicted(session: Session) -> dict[str, Any]:
    """What the simulator makes of the last trace and plan; the session is over."""
    if session.runtime.learned is None:
        return {}
    trace, plan = session.runtime.learned
    if not trace.times or not trace.others:
        return {}
    simulated = simulate(trace, session.runtime.options.links, plan)
    return {
        "predicted_step": simulated.seconds,
        "predicted_ideal": simulated.ideal,
        "predicted_peak": simulated.peak["hbm"],
        "plan": {
            "kept": plan.kept_bytes,
            "moved": plan.moved_bytes,
            "groups": len(plan.groups),
            "recomputed": len(plan.recompute),
        },
    }


def _hbm_peak(method: Method, session: Session) -> dict[str, int]:
    """Where PyTorch's statistics do not tell HBM from DRAM, or there is no GPU, what the session counted."""
    hbm: int = session.stats()["peak"]["hbm"]
    if method.allocator == "pages":
        return {"reserved": hbm}
    return {} if torch.cuda.is_available() else {"reserved": hbm, "allocated": hbm}


def _unused(directory: Path) -> Path:
    """The directory, or the first of its name and a number that does not exist: an earlier run is never overwritten."""
    unused, number = directory, 2
    while unused.exists():
        unused, number = directory.with_name(f"{directory.name}-{number}"), number + 1
    return unused


def peaks() -> dict[str, int]:
    """Peak bytes allocated and reserved since they were last reset."""
    if not torch.cuda.is_available():
        return {"allocated": 0, "reserved": 0}
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def _all_memory() -> int:
    return int(torch.cuda.mem_get_info()[1]) if torch.cuda.is_available() else sys.maxsize


def clean() -> None:
    """Give back what the last method left, in HBM and pinned."""
    gc.collect()
    if not torch.cuda.is_initialized():
        return
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    for name in ("_accelerator_emptyHostCache", "_host_emptyCache"):  # newer and older PyTorch
        if (empty := getattr(torch._C, name, None)) is not None:
            empty()
            break
    torch.cuda.reset_peak_memory_stats()
