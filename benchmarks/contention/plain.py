"""Plain PyTorch, without tiers, in a process of its own that trains when it is told to.

Two programs that take turns of seconds can be compared on a host that others use, which is never the same for long.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

from torch_tiers.allocator.sizes import GiB

ANSWERS = 300.0  # seconds in which a turn has to be over
LINKS = -1  # asks for the links in place of steps


class Plain:
    """A workload of `benchmarks.workloads`.

    Parameters
    ----------
    workload
        Its name there.
    tiny
        The small variant, on a CPU.
    """

    def __init__(self, workload: str, tiny: bool) -> None:
        context = multiprocessing.get_context("spawn")  # it must not inherit a CUDA context
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, workload, tiny), daemon=True)
        self._process.start()
        theirs.close()  # or nobody would be told of its end

    def train(self, steps: int) -> None:
        """Train for so many steps, until the last is over on the device.

        Raises
        ------
        RuntimeError
            If the process has ended, or takes minutes.
        """
        self._ask(steps, f"to the end of {steps} steps")

    def links(self) -> tuple[float, float]:
        """Bytes per second of the lanes, out and back, as long as nothing else uses them.

        Measured there: where this process has our pages, they have to be under PyTorch before it uses the GPU.
        """
        found: tuple[float, float] = self._ask(LINKS, "to measure the links")
        return found

    def _ask(self, what: int, task: str) -> Any:
        try:
            self._pipe.send(what)
            if not self._pipe.poll(ANSWERS):
                raise RuntimeError(f"plain training did not come {task} in {ANSWERS:.0f} s")
            return self._pipe.recv()
        except (EOFError, OSError):
            raise RuntimeError("the process of plain training has ended; what it said is above") from None

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def link_speed() -> tuple[float, float]:
    """Bytes per second of one pinned 1 GiB copy, out and back; the best of five."""
    import torch

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


def _serve(pipe: Connection, name: str, tiny: bool) -> None:
    import torch

    from benchmarks import workloads

    step = getattr(workloads, name)("cuda" if torch.cuda.is_available() else "cpu", tiny=tiny).step
    while True:
        try:
            steps = pipe.recv()
        except EOFError:
            return  # whoever asked is gone
        if steps == LINKS:
            pipe.send(link_speed())
            torch.cuda.empty_cache()
            continue
        for _ in range(steps):
            loss = step()
        loss.item()  # waits for the device
        pipe.send(None)
