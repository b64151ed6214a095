"""The runtime: switches the hooks on, knows when periods and steps end, and owns what the devices share.

It arms late. Installing only registers module and optimizer hooks; the first forward that could train
switches the saved-tensor hooks on, for its thread, and the first tensor saved on a device makes that
device's engine. So DataLoader workers, compile workers and launchers, which import PyTorch under the same
environment, never start anything, and no CUDA context is made before the program makes it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as optim_hooks
from torch.utils.data import get_worker_info

from allocator.errors import TiersError
from allocator.sizes import format_size
from migrator import peaks, weights
from migrator.backing import Backing
from migrator.counters import Counters
from migrator.engine import Engine
from migrator.hooks import Saver
from migrator.lanes import Compute, CudaCompute, CudaLane, HostCompute, HostLane
from migrator.learner import Learner
from migrator.mover import Mover
from migrator.policies import POLICIES
from migrator.steps import StepTimes

log = logging.getLogger("tiers")

FRAGMENTS = 0.05  # of the budget, on a GPU: what PyTorch's allocator reserves beyond what it allocates
FIRST_STEPS = 3  # steps after which an optimizer has made its state


class BudgetTooSmall(TiersError):
    """The HBM budget does not even hold what lives as long as the program."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the runtime is told.

    Attributes
    ----------
    policy : str
        A name of `migrator.policies.POLICIES`.
    hbm : callable
        The HBM budget of a device, in bytes.
    enforce : bool
        Have PyTorch's allocator refuse what exceeds the budget.
    capacity : int
        Bytes below HBM, all tiers together.
    backing : callable
        Makes the backing when the first tensor is about to move.
    """

    policy: str
    hbm: Callable[[torch.device], int]
    enforce: bool
    capacity: int
    backing: Callable[[Counters, bool], Backing]


class _Thread(threading.local):
    saver: Saver | None = None


class Runtime:
    """Moves the saved tensors of every thread that trains, from `install` to `close`."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.counters = Counters()
        self.periods = 0
        self.steps = StepTimes()
        self.unmanaged_bytes = 0
        self._thread = _Thread()
        self._movers: list[Mover] = []
        self._backing: Backing | None = None
        self._lock = threading.Lock()
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._savers: list[Saver] = []
        self._handles: list[Any] = []
        self._pid = os.getpid()
        self.closed = False
        self.refuse: Callable[[BudgetTooSmall], None] | None = None  # ends the program instead of raising

    # ------------------------------------------------------------------------------------ on, off

    def install(self) -> None:
        """Register with PyTorch. Touches no device.

        Raises
        ------
        RuntimeError
            If another runtime is installed.
        """
        global _active
        if _active is not None:
            raise RuntimeError("tiers is active already: close that session before opening another")
        _active = self
        module_hooks = nn.modules.module
        self._handles = [
            module_hooks.register_module_forward_pre_hook(_enter),
            # Also called when the forward raises: the path of modules must not keep what was left.
            module_hooks.register_module_forward_hook(_leave, always_call=True),
            optim_hooks.register_optimizer_step_post_hook(_stepped),
        ]
        torch.autograd.graph.disable_saved_tensors_hooks = _suspending
        peaks.install()

    def close(self) -> None:
        """Switch everything off, and wait for copies and disk requests that are under way. Idempotent."""
        global _active
        if self.closed or os.getpid() != self._pid:
            return
        self.closed = True
        _active = None
        torch.autograd.graph.disable_saved_tensors_hooks = _plain_disable
        peaks.uninstall()
        for handle in self._handles:
            handle.remove()
        saver = self._thread.saver
        if saver is not None:
            saver.end_period()
        for other in self._savers:
            other.pop()
        for mover in self._movers:
            mover.engine.close()
            device = mover.engine.compute.device
            if self.options.enforce and device.type == "cuda":
                torch.cuda.set_per_process_memory_fraction(1.0, device)
        if self._backing is not None:
            self._backing.close()

    @property
    def armed(self) -> bool:
        """Whether anything has trained under it, in this process."""
        return bool(self._savers) and os.getpid() == self._pid

    def enter(self, module: nn.Module) -> None:
        """A forward begins in this thread."""
        saver = self._thread.saver or self._arm()
        if saver is not None:
            saver.enter(module)

    def leave(self) -> None:
        """A forward ends in this thread."""
        saver = self._thread.saver
        if saver is not None:
            saver.modules.leave()

    def _arm(self) -> Saver | None:
        if not torch.is_grad_enabled() or get_worker_info() is not None or torch._C._current_graph_task_id() != -1:
            return None
        autograd: Any = torch._C._autograd
        # Hooks form a stack. Pushed on top of somebody's, ours would be what his `with` block pops at its end.
        if not autograd._saved_tensors_hooks_is_enabled() or autograd._top_saved_tensors_default_hooks(True):
            return None
        saver = Saver(self._make_mover, self._root_begins, self._period_over)
        saver.push()
        self._thread.saver = saver
        self._savers.append(saver)
        return saver

    def forked(self) -> None:
        """In the child of a fork: the engine's threads, streams and files belong to the parent."""
        if self._thread.saver is not None:
            self._thread.saver.pop()
            self._thread.saver = None

    # ------------------------------------------------------------------------------------ devices

    def _make_mover(self, device: torch.device) -> Mover | None:
        on_gpu = device.type == "cuda"
        if not self._has_tiers(device):
            return None
        with self._lock:
            budget = self.options.hbm(device)
            if self._backing is None:
                self._backing = self.options.backing(self.counters, on_gpu)
            compute: Compute
            if on_gpu:
                compute = CudaCompute(device, self.counters)
                out, back = (CudaLane(device, name, self.counters) for name in ("d2h", "h2d"))
                engine = Engine(compute, out, back, self._backing)
                if self.options.enforce:
                    total = torch.cuda.get_device_properties(device).total_memory
                    torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), device)
            else:
                compute = HostCompute(self.counters)
                engine = Engine(compute, HostLane("d2h", self.counters), HostLane("h2d", self.counters), self._backing)
            target = int(budget * (1 - FRAGMENTS)) if on_gpu else budget
            learner = Learner(POLICIES[self.options.policy], target)
            mover = Mover(engine, learner, budget, self.options.capacity)
            self._movers.append(mover)
            self._recount_static()
            return mover

    def _root_begins(self, root: nn.Module) -> None:
        if root in self._roots:
            return
        self._roots.add(root)
        self._recount_static()
        tensors = [tensor for known in self._roots for tensor in weights.of_module(known)]
        for device in {tensor.device for tensor in tensors if self._has_tiers(tensor.device)}:
            needed, budget = weights.bytes_on(device, tensors), self.options.hbm(device)
            if needed > budget:
                error = BudgetTooSmall(
                    f"hbm is {format_size(budget)}, and the model's weights alone need {format_size(needed)} on "
                    f"{device}: raise TIERS_HBM above that, with room for gradients, optimizer state and one layer's work"
                )
                if self.refuse is not None:
                    self.refuse(error)
                raise error

    def _has_tiers(self, device: torch.device) -> bool:
        """Whether tensors on `device` move: those of GPUs, or of the host where there is no GPU."""
        return device.type == "cuda" or (device.type == "cpu" and not torch.cuda.is_available())

    def _recount_static(self) -> None:
        """Without a GPU nobody else counts what lives as long as the program."""
        for mover in self._movers:
            if isinstance(compute := mover.engine.compute, HostCompute):
                tensors = (tensor for root in self._roots for tensor in weights.of_module(root))
                compute.static = weights.bytes_on(compute.device, tensors) + sum(self._optimizers.values())

    # -------------------------------------------------------------------------- periods and steps

    def _period_over(self, saver: Saver) -> None:
        self.periods += 1
        whole, saver.steps_before = saver.steps_before > 0, self.steps.count
        changed = False
        for mover in saver.armed_movers:
            self.unmanaged_bytes = max(self.unmanaged_bytes, mover.unmanaged)
            changed |= mover.end_period(whole=whole)
        if changed:
            saver.adopt(action for mover in saver.armed_movers for action in mover.actions())

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made a step."""
        self.steps.step(time.perf_counter())
        if self.steps.count <= FIRST_STEPS:
            self._optimizers[optimizer] = weights.bytes_on(torch.device("cpu"), weights.of_optimizer(optimizer))
            self._recount_static()
        saver = self._thread.saver
        if saver is not None:
            saver.modules.leave_all()
            saver.end_period()

    # ----------------------------------------------------------------------------------- numbers

    def numbers(self) -> dict[str, Any]:
        """What happened so far, as `stats.json` has it."""
        peaks = [mover.engine.compute.reserved() for mover in self._movers]
        return {
            "device": ", ".join(dict.fromkeys(_name(mover.engine.compute.device) for mover in self._movers)),
            "budget_hbm": max((mover.budget for mover in self._movers), default=0),
            "periods": self.periods,
            "steps": self.steps.count,
            "peak_hbm": max(peaks, default=0),
            "moved": dict(self.counters.moved),
            "groups": sum(mover.engine.sent for mover in self._movers),
            "stalls": {cause: {"count": s.count, "seconds": s.seconds} for cause, s in self.counters.stalls.items()},
            "unmanaged_bytes": self.unmanaged_bytes,
            "step_s": self.steps.summary(),
        }


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


# What PyTorch calls. These are plain functions of the module because Dynamo traces module hooks: it must
# find nothing but the question whether it is tracing, whose answer it knows.

_active: Runtime | None = None


def _enter(module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    if _active is not None:
        _active.enter(module)


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    if _active is not None:
        _active.leave()


def _stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    if _active is not None:
        _active.stepped(optimizer)


_plain_disable = torch.autograd.graph.disable_saved_tensors_hooks


@contextlib.contextmanager
def _suspending(error_message: str) -> Generator[None, None, None]:
    """`torch.autograd.graph.disable_saved_tensors_hooks`, for which our hooks do not count.

    `torch.func` enters it and would refuse to run. Hooks of the program's own still make it refuse.
    """
    saver = _active._thread.saver if _active is not None else None
    if saver is None or not saver.on_top():
        with _plain_disable(error_message):
            yield
        return
    torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        with _plain_disable(error_message):
            yield
    finally:
        saver.push()


def _after_fork() -> None:
    global _active
    if _active is not None:
        _active.forked()
        _active = None


os.register_at_fork(after_in_child=_after_fork)
