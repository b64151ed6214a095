"""The process that measures: a request a line comes in, an answer a line goes out."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

LEFT = 256 << 20  # bytes that a failed method may leave in HBM before a new process has to take over


def serve(bench: Any, requests: IO[str], answers: IO[str], allocated: Callable[[], int]) -> None:
    """Answer requests until there are no more, or this process cannot be trusted any more."""
    from benchmarks.fractions.cells import parse
    from torch_tiers.allocator.errors import TiersError

    for line in requests:
        request = json.loads(line)
        started = time.perf_counter()
        answer: dict[str, Any]
        again = False
        try:
            answer = bench.measure(parse(request["method"]), request.get("hbm"))
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {_first_line(error)}"}
            again = not isinstance(error, TiersError) and "OutOfMemory" not in type(error).__name__
        if "failed" in answer:  # outside of `except`: the traceback holds what the method had
            with suppress(Exception):
                again |= _left(allocated) > LEFT
        answer |= {"took": time.perf_counter() - started, "again": again}
        print(json.dumps(answer), file=answers, flush=True)
        if again:
            return


def _left(allocated: Callable[[], int]) -> int:
    from benchmarks.fractions.measure import clean

    clean()
    return allocated()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no reason given"])[0][:300]


def main(words: list[str]) -> None:
    """Be a worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--dram", default="64GiB")
    parser.add_argument("--trl", type=Path)
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--lengths", type=json.loads, default={})
    options = parser.parse_args(words)

    # Whatever a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    import torch

    from benchmarks import workloads
    from benchmarks.fractions.measure import Bench, Lengths

    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    build = partial(getattr(workloads, options.workload), device, tiny=options.tiny, batch=options.batch)
    runs = options.runs / options.workload if options.runs else None
    bench = Bench(build, options.dram, options.trl, runs, Lengths(**options.lengths))
    serve(bench, sys.stdin, answers, torch.cuda.memory_allocated if cuda else int)
