"""Where PyTorch calls in: calls of modules, optimizer hooks, forks, and the two functions that `torch.func` needs.

At most one runtime is installed in a process. Modules are told of by a function in the place of `nn.Module.__call__`,
not by PyTorch's global module hooks: with those every call takes the long way through PyTorch, and a compiled block
longer still, also where nothing is to be done. Dynamo passes it by, or, where it does trace it, must find nothing there
but the question whether it is tracing, whose answer it knows.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.optim import optimizer as optimizer_hooks

from torch_tiers.allocator.errors import TiersError
from torch_tiers.migrator.offload.engine import Engine
from torch_tiers.migrator.program import process_groups
from torch_tiers.migrator.program.by_parameter import Step
from torch_tiers.migrator.recompute.replays import Replay
from torch_tiers.migrator.recompute.verified import Verified
from torch_tiers.migrator.runtime import optimizer_loads, optimizer_steps
from torch_tiers.migrator.runtime.without_modules import WithoutModules
from torch_tiers.migrator.saved.mover import Mover
from torch_tiers.migrator.saved.saver import Saver
from torch_tiers.migrator.saved.spot_checks import Checks
from torch_tiers.migrator.saved.tensors import Calls, HookTensors
from torch_tiers.migrator.streams import peaks
from torch_tiers.migrator.streams.host import HostCompute
from torch_tiers.migrator.weights.streamer import place_of_copy

log = logging.getLogger("tiers")


class AlreadyActive(TiersError):
    """Another runtime is installed in this process."""


class Listener(Protocol):
    """What a runtime is told."""

    def enter(self, module: nn.Module) -> object:
        """A module is called in this thread, hooks of its own included; whether `leave` is to be called after that.

        What is returned is held until then.
        """

    def leave(self) -> None:
        """The call ends, also when it raised."""

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer begins a step."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made a step."""

    @property
    def loading(self) -> optimizer_loads.Loading: ...  # noqa: D102

    def run_step(self, optimizer: torch.optim.Optimizer, step: Step, /) -> Any:
        """Make a step of an optimizer that updates each parameter by itself; `step` makes a whole one."""

    def forked(self) -> None:
        """This is the child of a fork."""

    def backward_begins(self) -> object:
        """A backward begins in this thread, perhaps within another."""

    def backward_over(self) -> None:
        """It has ended, also when it raised."""

    def saver(self) -> Saver | None:
        """The hooks of this thread, if they are on."""


_active: Listener | None = None
_without_modules: WithoutModules | None = None  # of that
_left_behind = False  # in the child of a fork, until that was said: the parent's streams and threads are not its own
_handles: list[Any] = []


def install(listener: Listener) -> None:
    """Have PyTorch call `listener`. Touches no device.

    Raises
    ------
    AlreadyActive
        If another one is installed.
    """
    global _active, _without_modules
    if _active is not None:
        raise AlreadyActive(
            "tiers is active already in this process: close that session before opening another, or, if "
            "TIERS_ALLOCATOR has opened it, unset that or leave tiers.session out"
        )
    if _handles:  # of whom a fork has left behind: each would be called twice
        uninstall()
    _active, _without_modules = listener, WithoutModules(listener)
    try:
        _handles.append(optimizer_hooks.register_optimizer_step_pre_hook(_stepping))
        _handles.append(optimizer_hooks.register_optimizer_step_post_hook(_stepped))
        _autograd._saved_tensors_hooks_disable = _disable
        _autograd._saved_tensors_hooks_enable = _enable
        _stand_before_calls()
        _stand_before_backwards()
        optimizer_steps.install(listener.run_step)
        optimizer_loads.install(listener.loading)
        peaks.install()
        process_groups.install()
        _keep_dynamo_out()
    except BaseException:
        uninstall()
        raise


def uninstall() -> None:
    """Undo `install`."""
    global _active, _without_modules
    _active = _without_modules = None
    _take_the_long_way()
    while _handles:
        _handles.pop().remove()
    _autograd._saved_tensors_hooks_disable = _plain_disable
    _autograd._saved_tensors_hooks_enable = _plain_enable
    _stand_aside()
    _leave_backwards()
    optimizer_steps.uninstall()
    optimizer_loads.uninstall()
    peaks.uninstall()
    process_groups.uninstall()


_plain_call: Any = None  # what it was when ours was put over it
_our_call: Any = None
_limits = (0, 0)  # of recursion: the one there was, and the one that we set


def _stand_before_calls() -> None:
    """Be told of every call of a module from now on."""
    global _plain_call, _our_call, _limits
    plain = _plain_call = nn.Module.__call__
    # PyTorch's call of a module takes four of these, and ours one more.
    _limits = sys.getrecursionlimit(), sys.getrecursionlimit() * 4 // 3
    sys.setrecursionlimit(_limits[1])

    @wraps(plain)
    def call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:  # PyTorch's profiler looks for a `self` here
        # Whoever has kept this function may call it when it is of no session any more.
        # What is entered lives as long as this frame.
        if is_compiling() or _our_call is not call or not (entered := _to_enter(self)):  # noqa: F841
            return plain(self, *args, **kwargs)
        try:
            return plain(self, *args, **kwargs)
        finally:  # also after an exception: the path of modules must not keep what was left
            _to_leave()

    call.__qualname__ = "Module.__call__"  # by which pickle finds it
    nn.Module.__call__ = _our_call = call  # type: ignore[method-assign]
    _tell_dynamo(plain, call)


def _stand_aside() -> None:
    """Be told of no call any more."""
    global _plain_call, _our_call
    if sys.getrecursionlimit() == _limits[1]:  # else the program has set one of its own since
        sys.setrecursionlimit(_limits[0])
    if nn.Module.__call__ is _our_call:  # what somebody has put over it since is not ours to undo
        nn.Module.__call__ = _plain_call  # type: ignore[method-assign]
    if _our_call is not None:
        _tell_dynamo(_our_call, _plain_call)
    _plain_call = _our_call = None


def _tell_dynamo(old: Any, new: Any) -> None:
    """Have it know a module's call when it sees one: else it traces all that stands between that and `forward`."""
    for name in ("torch._dynamo.utils", "torch._dynamo.variables.nn_module"):
        dynamo: Any = sys.modules.get(name)  # to import that takes seconds, and the program may not need it
        if dynamo is not None and getattr(dynamo, "unpatched_nn_module_call", None) is old:
            dynamo.unpatched_nn_module_call = new


def _enter(module: nn.Module) -> object:
    # TorchScript's tracer would take the operators that we try for the program's.
    if _active is None or torch._C._get_tracing_state():
        return False
    if _without_modules is not None:
        _without_modules.module_called(module)
    return _active.enter(module)


def _leave() -> None:
    if _active is not None:
        _active.leave()


_to_enter: Callable[[nn.Module], object] = _enter
_to_leave: Callable[[], None] = _leave


def shorten(tensors: HookTensors) -> Calls:
    """Have calls of modules take a shortcut in threads that are armed with it; return it."""
    global _to_enter, _to_leave
    calls = tensors.calls(_enter, _leave)
    _to_enter, _to_leave = calls.enter, calls.leave
    return calls


def _take_the_long_way() -> None:
    global _to_enter, _to_leave
    _to_enter, _to_leave = _enter, _leave


def _stepping(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if is_compiling():
        return
    if _active is not None:
        if _without_modules is not None:
            _without_modules.stepping()
        _active.stepping(optimizer)


def _stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if is_compiling():
        return
    if _active is not None:
        _active.stepped(optimizer)
        if _without_modules is not None:
            _without_modules.stepped(optimizer)
    elif _left_behind:
        _say_left_behind()


# The engine copies the hooks that are on the stack as a backward begins, several times for each node of the graph, and
# each copy takes the interpreter's lock: 20 times a node. Nothing that backward saves is ours to move, so our hooks are
# off meanwhile; tensors that were saved before have theirs.

_differentiation: Any = torch.autograd  # whose `backward` and `grad` look the function up that is replaced
_plain_backward: Any = None
_our_backward: Any = None


def _stand_before_backwards() -> None:
    global _plain_backward, _our_backward
    plain = _plain_backward = _differentiation._engine_run_backward

    @wraps(plain)
    def backward(*args: Any, **kwargs: Any) -> Any:
        paused = _pause()  # what has begun lives as long as this frame
        try:
            return plain(*args, **kwargs)
        finally:
            _unpause(paused)

    _differentiation._engine_run_backward = _our_backward = backward


def _pause() -> tuple[object, Saver | None]:
    if _active is None:
        return None, None
    begun, saver = _active.backward_begins(), _active.saver()
    return begun, saver if saver is not None and saver.pause() else None


def _unpause(paused: tuple[object, Saver | None]) -> None:
    _, saver = paused
    if saver is not None:
        saver.unpause()
    if _active is not None:
        _active.backward_over()


def _leave_backwards() -> None:
    global _plain_backward, _our_backward
    if _our_backward is not None and _differentiation._engine_run_backward is _our_backward:
        _differentiation._engine_run_backward = _plain_backward
    _plain_backward = _our_backward = None


# `torch.func` disables saved-tensor hooks while it runs, which PyTorch refuses while there are any; for this ours do
# not count. Hooks of the program's own, above ours, still make it refuse. The functions below
# `torch.autograd.graph.disable_saved_tensors_hooks` are replaced, not that one: Dynamo knows it by identity.

_autograd: Any = torch._C._autograd
_plain_disable = _autograd._saved_tensors_hooks_disable
_plain_enable = _autograd._saved_tensors_hooks_enable


def _disable(message: str, *rest: bool) -> None:
    saver = None if _active is None else _active.saver()
    if saver is not None and saver.on_top():
        saver.suspend()
    _plain_disable(message, *rest)


def _enable() -> None:
    _plain_enable()
    saver = None if _active is None else _active.saver()
    if saver is not None:
        saver.resume()


def _keep_dynamo_out() -> None:
    """Have Dynamo run our entry points, and what they call, as they are, also where it traces what calls them.

    The hooks in C++ have no frame in Python, so what those call are entry points, too.

    `torch._dynamo.disable` says the same and puts a wrapper around each call.
    """
    from torch._C._dynamo import eval_frame  # importing this does not import torch._dynamo

    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    of_engines = (Engine.relieve, Engine.prefetch)
    of_movers_and_savers = (Mover.take, Mover.restore, Saver.drop, Saver.bypass, Verified.find, Checks.look)
    by_the_shortcut = (*of_movers_and_savers, Replay.run, *of_engines, place_of_copy)
    hooks = (Saver.pack, Saver.unpack, HostCompute.capturing, *by_the_shortcut)
    entries = (_enter, _leave, _pause, _unpause, _stepping, _stepped, _disable, _enable)
    for function in (*hooks, *entries):
        eval_frame.set_code_exec_strategy(function.__code__, skip)
    # What a module's call or a backward comes to is the program's, though.
    passed = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
    for function in (_our_call, _our_backward):
        eval_frame.set_code_exec_strategy(function.__code__, passed)


def _after_fork() -> None:
    global _active, _left_behind
    if _active is not None:
        _active.forked()
        _active, _left_behind = None, True
        _take_the_long_way()
        optimizer_steps.uninstall()
        optimizer_loads.uninstall()


def _say_left_behind() -> None:
    """This process trains: it is no DataLoader's worker."""
    global _left_behind
    _left_behind = False
    log.warning("tiers is off in this process, which was forked: have trainers started by spawn, or by torchrun")


os.register_at_fork(after_in_child=_after_fork)
