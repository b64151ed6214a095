"""What `tiers bench` has within a program: it notes when steps end, and writes what it saw as the process exits.

The same for the plain program, for one under tiers and for every peer. It changes nothing of what the program does.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections import deque
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

WATCH = "_TORCH_TIERS_WATCH"
"""The directory to write into: a variable of `tiers bench` alone."""
AROUND = "_TORCH_TIERS_AROUND"
"""What is put around the program: `SAVE_ON_CPU`, or ``compile:0.4``, a share of a compiled graph's activations."""
SAVE_ON_CPU = "save_on_cpu"
FILE = "watched"
KEPT = 4096  # steps


@cache
def begin() -> None:
    """Watch this process, at the end of ``import torch``."""
    import torch
    from torch.optim import optimizer as optimizers

    around = os.environ.get(AROUND, "")
    if around == SAVE_ON_CPU:
        torch.autograd.graph.save_on_cpu(pin_memory=True).__enter__()
    elif around:
        import torch._functorch.config as functorch

        functorch.activation_memory_budget = float(around.partition(":")[2])
    watch = Watch(Path(os.environ[WATCH]))
    optimizers.register_optimizer_step_pre_hook(watch.stepping)
    optimizers.register_optimizer_step_post_hook(watch.step)
    atexit.register(watch.write)


class Watch:
    """Notes when the optimizer's steps end; on a GPU by events, so that the program need not wait for the device."""

    def __init__(self, directory: Path) -> None:
        from torch_tiers.migrator.program.optimizers import Optimizers  # it needs torch

        self._directory = directory
        self._optimizers = Optimizers()
        self._process = os.getpid()
        self._count = 0
        self._marks: deque[tuple[float, Any]] = deque(maxlen=KEPT)

    def stepping(self, optimizer: Any, *_: object) -> None:
        """A step begins."""
        self._optimizers.stepping(optimizer)

    def step(self, optimizer: Any, *_: object) -> None:
        """A step has ended."""
        import torch

        if not self._optimizers.stepped(optimizer).counts:
            return
        event = None
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._count += 1
        self._marks.append((time.perf_counter(), event))

    def write(self) -> None:
        """Write what was seen, if this process has trained at all."""
        if not self._count or os.getpid() != self._process:
            return
        import torch

        cuda = torch.cuda.is_initialized()
        reserved = 0
        if cuda and not os.environ.get("TIERS_ALLOCATOR"):  # there PyTorch's statistics do not tell HBM from DRAM
            reserved = torch.cuda.max_memory_reserved()
        told = {
            "rank": int(os.environ.get("RANK", 0)),
            "steps": self._count,
            "step_s": self._times(),
            "reserved": reserved,
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "compiles": _compiled(),
            "torch": torch.__version__,
        }
        part = self._directory / f".{FILE}-{self._process}.part"
        part.write_text(json.dumps(told))
        part.replace(self._directory / f"{FILE}-{self._process}.json")

    def _times(self) -> list[float]:
        """Seconds between the ends of steps."""
        import torch

        events = [event for _, event in self._marks]
        if all(event is not None for event in events):
            with suppress(RuntimeError):  # of two devices, or a device that failed
                torch.cuda.synchronize()
                return [one.elapsed_time(other) / 1e3 for one, other in pairwise(events)]
        return [later - earlier for (earlier, _), (later, _) in pairwise(self._marks)]


def _compiled() -> bool:
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["stats"]["unique_graphs"])
