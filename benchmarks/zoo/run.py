"""Run one program of the zoo, and print its losses, and what it did as one line of JSON.

``python -m benchmarks.zoo.run PROGRAM --size full --steps N [--checkpoint]``; with ``TIERS_ALLOCATOR=pages`` around it
the same program runs with tiers, of which nothing here knows. Those on several GPUs are started by torchrun, which
takes the place of ``python``; their first rank prints.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor, distributed

from benchmarks.alternate import host_us, sm_clock
from benchmarks.zoo.program import PROGRAMS, SIZES, Program, Unavailable, maker

LAST = 12  # steps that are timed
SAID = 10  # steps after which the loss is said, as programs do: until then nothing waits for the device
UNAVAILABLE = 3  # exit code
DETERMINISTIC: dict[str, Any] = {"choices": ("all", "where-possible")}
"""`where-possible`: of others PyTorch warns, and attention's backward is one of them, though it need not be."""


def run(program: Program, steps: int, cuda: bool) -> dict[str, Any]:
    """Train for so many steps; the losses, the median time of the last `LAST` steps, and the peaks in bytes.

    A step lasts from the end of the one before to its own end, on the device.
    """
    losses: list[Tensor] = []
    marks = [_mark(cuda)]

    def each(loss: Tensor) -> None:
        # A copy: mean squared error leaves its mean in a storage as large as the input, and all of them would stay.
        losses.append(loss.detach().clone())
        marks.append(_mark(cuda))
        if len(losses) % SAID == 0:
            print(f"step {len(losses)}: loss {loss.item():.4f}", file=sys.stderr, flush=True)

    program.train(steps, each)
    if cuda:
        torch.cuda.synchronize()
    times = [_between(*pair) for pair in itertools.pairwise(marks)]
    return {
        "losses": [float(loss.item()).hex() for loss in losses],
        "ms": statistics.median(times[-LAST:]),
        "times": [round(ms, 2) for ms in times],
        "state": sum(t.untyped_storage().nbytes() for t in program.state()),
        "allocated": torch.cuda.max_memory_allocated() if cuda else 0,
        "reserved": torch.cuda.max_memory_reserved() if cuda else 0,
    }


def of_all_ranks(measured: dict[str, Any]) -> dict[str, Any]:
    """What the slowest and largest rank measured, and the losses of all."""
    if not distributed.is_initialized():
        return measured
    told: list[dict[str, Any]] = [{}] * distributed.get_world_size()
    distributed.all_gather_object(told, measured)
    distributed.destroy_process_group()
    most = {name: max(one[name] for one in told) for name in ("ms", "state", "allocated", "reserved")}
    return measured | most | {"losses": [loss for one in told for loss in one["losses"]]}


def _mark(cuda: bool) -> Any:
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, end: Any) -> float:
    return float((end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end))


def main() -> None:
    """Run the program that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo.run")
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoint", action="store_true", help="with the checkpointing that the program has itself")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--deterministic", **DETERMINISTIC, help="of PyTorch's kernels only deterministic ones")
    options = parser.parse_args()
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at cuBLAS's first use
        torch.use_deterministic_algorithms(True, warn_only=options.deterministic == "where-possible")
        torch.backends.cudnn.benchmark = False
        torch.backends.cuda.enable_cudnn_sdp(False)  # whose backward is not, and raises or warns
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not get between
    try:
        program = maker(options.program)(options.size, options.device, options.checkpoint)
    except Unavailable as error:
        print(error, file=sys.stderr)
        sys.exit(UNAVAILABLE)
    cuda = torch.device(options.device).type == "cuda"
    measured = of_all_ranks(run(program, options.steps, cuda))
    if int(os.environ.get("RANK", 0)):
        return
    known = {"program": options.program, "size": options.size, "checkpoint": options.checkpoint, "steps": options.steps}
    about = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "clock": sm_clock() if cuda else None,
        "host_us": round(host_us(), 1),
    }
    for loss in measured["losses"]:  # for `tiers bench`, which compares what is printed
        print("loss", float.fromhex(loss), file=answers)
    print(json.dumps(known | measured | about), file=answers, flush=True)


if __name__ == "__main__":
    main()
