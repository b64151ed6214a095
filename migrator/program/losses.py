"""The losses of a program: what it calls `backward()` on. They stay on their device, and are read when the run ends.

Each takes a copy of one number on the device that computed it. Nobody waits for that, and it is no copy over the link,
behind which the program would wait for what the lanes carry. Only scalars count. A backward within a backward, as a
checkpoint's, is part of the outer one. While a CUDA graph is captured nothing is kept: each replay would write the same
place.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.optim import optimizer as optimizer_hooks

from torch_tiers.migrator.program.optimizers import Optimizers

MOST = 1 << 16  # losses of a run, the first ones, as two runs are compared from their beginning: 512 KiB of a device

_differentiation: Any = torch.autograd  # whose `backward` looks the function up that is replaced


class _Kept:
    """The losses of one device, and which of the program's they are."""

    def __init__(self, device: torch.device, most: int) -> None:
        self.values = torch.empty(most, dtype=torch.float64, device=device)  # it holds every type's exactly
        self.numbers, self.steps = array("q"), array("q")


class Losses:
    """Keeps the losses of this process from `install` to `uninstall`.

    Parameters
    ----------
    begun : callable
        Called at the first backward.
    most : int
        Losses that are kept, the first ones.

    Attributes
    ----------
    count : int
        Losses so far; `most` of them are kept.
    """

    def __init__(self, begun: Callable[[], None] | None = None, most: int = MOST) -> None:
        self.count = 0
        self._begun, self._most = begun, most
        self._step = 1  # the one under way
        self._kept: dict[torch.device, _Kept] = {}
        self._optimizers = Optimizers()
        self._lock = threading.RLock()  # between threads that call backward
        self._handle: Any = None
        self._plain: Any = None
        self._ours: Any = None
        self._pid = os.getpid()

    def install(self) -> None:
        """Be told of each backward and each step of an optimizer from now on."""
        plain = self._plain = _differentiation._engine_run_backward
        note = self._note

        @wraps(plain)
        def backward(outputs: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("accumulate_grad"):  # else it is `torch.autograd.grad`
                note(outputs)
            return plain(outputs, *args, **kwargs)

        _differentiation._engine_run_backward = self._ours = backward
        self._handle = optimizer_hooks.register_optimizer_step_post_hook(self._stepped)
        self._keep_dynamo_out(backward)

    def uninstall(self) -> None:
        """Undo `install`. What was kept can still be read."""
        if self._handle is not None:
            self._handle.remove()
        if self._ours is not None and _differentiation._engine_run_backward is self._ours:
            _differentiation._engine_run_backward = self._plain
        self._handle, self._most = None, 0  # who stands before us may go on to call us

    def read(self) -> list[tuple[int, float]]:
        """Return the step and the value of each loss, in their order. Waits for the devices.

        Raises
        ------
        RuntimeError
            If a device has failed.
        """
        found: list[tuple[int, int, float]] = []
        for kept in list(self._kept.values()):
            if kept.values.is_cuda:
                torch.cuda.synchronize(kept.values.device)  # whatever stream the program computes on
            count = len(kept.numbers)
            found += zip(kept.numbers[:count], kept.steps[:count], kept.values[:count].tolist(), strict=True)
        return [(step, value) for _, step, value in sorted(found, key=lambda row: row[0])]

    def _note(self, outputs: Sequence[Tensor]) -> None:
        if torch._C._current_graph_task_id() != -1 or os.getpid() != self._pid:
            return
        begun, self._begun = self._begun, None
        if begun is not None:
            begun()
        if len(outputs) != 1 or not _is_a_loss(loss := outputs[0]):
            return
        with self._lock:
            self.count += 1
            if self.count > self._most:
                return
            if (kept := self._kept.get(loss.device)) is None:
                try:
                    kept = self._kept[loss.device] = _Kept(loss.device, self._most)
                except RuntimeError:  # no memory is left, which the program is to meet at its own request
                    self._most = 0
                    return
            with torch.no_grad():
                kept.values[len(kept.numbers)].copy_(loss.detach().reshape(()))
            kept.steps.append(self._step)
            kept.numbers.append(self.count)  # last: whoever reads meanwhile sees whole ones

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not is_compiling():
            self._step += self._optimizers.stepped(optimizer).leads

    @staticmethod
    def _keep_dynamo_out(backward: Any) -> None:
        """Have Dynamo run ours as it is, and still trace what a backward comes to."""
        from torch._C._dynamo import eval_frame  # importing this does not import torch._dynamo

        skip, rest = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
        eval_frame.set_code_exec_strategy(backward.__code__, eval_frame._FrameExecStrategy(skip, rest))
        for function in (Losses._note, Losses._stepped):
            eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))


def _is_a_loss(output: Tensor) -> bool:
    return (
        type(output) is Tensor  # of a subclass nobody knows what copying it does, such as asking other ranks
        and output.device.type in ("cpu", "cuda")
        and output.numel() == 1
        and output.is_floating_point()
        and not (output.is_cuda and torch.cuda.is_current_stream_capturing())
    )
