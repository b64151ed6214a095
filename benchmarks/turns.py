"""Variants of a program in processes of their own, which take turns step by step.

An allocator is chosen before CUDA is initialised, so each variant is a process; they take turns, so that a clock that
drifts hits all of them. ``python -m benchmarks.turns WORKLOAD`` is one, which `Worker` starts and asks.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.workloads import Workload
    from benchmarks.zoo.program import Program

VARIANTS = {
    "plain": {},
    "expandable": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    "pages": {"TIERS_ALLOCATOR": "pages", "TIERS_POLICY": "keep"},
}
ZOO = "zoo."  # before the name of one of its programs, which are workloads, too
KERNELS = "kernels"  # what a worker is asked for beside steps
WARMUP = 8
SETTLING = 96  # the same where plans are made, and compete
STUCK = 300  # seconds without a step

Span = tuple[str, float, float]
"""A kernel, and when it began and ended, in microseconds."""


def moves(variant: str) -> bool:
    """Whether the variant's policy moves anything."""
    return ":" in variant.partition("#")[0]


def learning(variant: str) -> int:
    """Steps until it is as fast as it gets."""
    return SETTLING if moves(variant) else WARMUP


def environment(variant: str, hbm: str | None) -> dict[str, str]:
    """What makes a process the variant: ``NAME[:POLICY][#ANY]``; policies have `hbm` as their budget."""
    name, _, policy = variant.partition("#")[0].partition(":")
    if not policy:
        return VARIANTS[name]
    return {**VARIANTS[name], "TIERS_POLICY": policy, **({"TIERS_HBM": hbm} if hbm else {})}


class Worker:
    """A variant's process, which trains one step when asked."""

    def __init__(
        self, workload: str, device: str, tiny: bool, environ: dict[str, str], share: float | None = None
    ) -> None:
        command = [sys.executable, "-m", "benchmarks.turns", workload, "--device", device]
        if tiny:
            command.append("--tiny")
        if share is not None:
            command += ["--compiled", str(share)]
        started = time.perf_counter()
        environ = {"TIERS_PLAN_CACHE": "0", **environ}  # what it takes to learn is a part of it
        self._process = subprocess.Popen(
            command, env={**os.environ, **environ}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.first = self.step()
        self.startup = time.perf_counter() - started

    def step(self) -> dict[str, float]:
        """Train one step; what the process measured."""
        measured: dict[str, float] = self._ask("step")
        return measured

    def kernels(self) -> list[Span]:
        """Train one step; its kernels, or without a GPU its operations."""
        return [(name, start, end) for name, start, end in self._ask(KERNELS)[KERNELS]]

    def _ask(self, command: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended with code {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def work(
    workload: str, device: str, *, tiny: bool, commands: IO[str], answers: IO[str], share: float | None = None
) -> None:
    """Be a worker: a step for every line of `commands`, with its kernels where these are asked for."""
    from benchmarks import workloads
    from benchmarks.compiled import compiled
    from benchmarks.zoo.program import maker

    if workload.startswith(ZOO):
        _train(
            maker(workload.removeprefix(ZOO))("cpu" if tiny else "full", device), device == "cuda", commands, answers
        )
        return
    arguments = {"tiny": True} if tiny else {}
    job = getattr(workloads, workload)(device, **arguments)
    with ExitStack() as stack:
        _train(job if share is None else compiled(job, share, stack), device == "cuda", commands, answers)


def _train(job: Workload | Program, cuda: bool, commands: IO[str], answers: IO[str]) -> None:
    import torch

    for command in commands:
        # One that hangs says where, and ends: else whoever waits for what it prints waits for ever.
        faulthandler.dump_traceback_later(STUCK, exit=True)
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        asked = command.strip() == KERNELS
        with recorded(asked, cuda=cuda) as kernels:
            start = time.perf_counter()
            loss = job.step()
            queued = time.perf_counter() - start
            loss.item()
            if cuda:
                torch.cuda.synchronize()
        answer: dict[str, Any] = {
            "step": time.perf_counter() - start,
            "queued": queued,
            "allocated": torch.cuda.max_memory_allocated() if cuda else 0,
            "reserved": torch.cuda.max_memory_reserved() if cuda else 0,
        }
        if asked:
            answer[KERNELS] = kernels
        print(json.dumps(answer), file=answers, flush=True)
        faulthandler.cancel_dump_traceback_later()  # to wait for the next command is not to hang


@contextmanager
def recorded(on: bool, *, cuda: bool) -> Iterator[list[Span]]:
    """Record the kernels that run inside, if `on`; without a GPU the operations."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    spans: list[Span] = []
    if not on:
        yield spans
        return
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as record:
        yield spans
        if cuda:
            torch.cuda.synchronize()
    wanted = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    found = (event for event in record.events() or [] if event.device_type == wanted)
    spans += sorted(((event.name, event.time_range.start, event.time_range.end) for event in found), key=_begin)


def _begin(span: Span) -> float:
    return span[1]


def main() -> None:
    """Be a worker, until there are no more commands."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--compiled", type=float)
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not get between the answers
    how = {"tiny": options.tiny, "share": options.compiled}
    work(options.workload, options.device, **how, commands=sys.stdin, answers=answers)


if __name__ == "__main__":
    main()
