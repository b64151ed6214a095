"""Stands between the steps of PyTorch's optimizers and the hooks that PyTorch calls around each step."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch._C._dynamo import eval_frame  # importing this does not import torch._dynamo
from torch.compiler import is_compiling
from torch.optim import Optimizer

from torch_tiers.migrator.program.by_parameter import BY_PARAMETER, Step

_run: Callable[[Optimizer, Step], Any] | None = None
_plain: dict[Any, Any] = {}  # by the functions of ours that stand before them
_thread = threading.local()  # `within`: whether it makes a step of ours
# Where its own steps are, or what it decorates them with; Dynamo puts functions of its own before some, hooks included.
_PYTORCHS = tuple(os.path.join(os.path.dirname(torch.__file__), name, "") for name in ("optim", "utils"))
# Dynamo passes a function by, and sees what that calls.
_PASSED = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
_HOOKED = Optimizer.profile_hook_step(lambda self: None).__code__


def install(run: Callable[[Optimizer, Step], Any]) -> None:
    """Have `run` make the steps of optimizers that update each parameter by itself, given what makes a whole step.

    A step with a closure is made as it comes: what the closure computes belongs to all parameters. So is one that
    somebody else has put a function before, or has compiled.
    """
    global _run
    _run = run
    for kind in _with_steps():
        plain = _without_hooks(kind)
        if plain not in _plain and _is_pytorchs(plain):
            ours = _before(plain)
            _plain[ours] = plain
            _put(kind, ours)


def uninstall() -> None:
    """Undo `install`."""
    global _run
    _run = None
    for kind in _with_steps():
        if (ours := _without_hooks(kind)) in _plain:  # else somebody has put another over it since
            _put(kind, _plain[ours])
    _plain.clear()


def _with_steps() -> list[Any]:
    """Those that have a step of their own. PyTorch gives a class one, with hooks, when its first instance is made."""
    return [kind for kind in BY_PARAMETER if "step" in vars(kind)]


def _before(plain: Any) -> Any:
    def step(self: Optimizer, closure: Any = None) -> Any:
        # Somebody may have put a function over ours that calls it, and a later session has put ours over that.
        if is_compiling() or closure is not None or _run is None or getattr(_thread, "within", False):
            return plain(self, closure)
        if _is_watched():
            return plain(self)
        _thread.within = True
        try:
            return _run(self, plain)
        finally:
            _thread.within = False

    eval_frame.set_code_exec_strategy(step.__code__, _PASSED)
    return wraps(plain)(step)


def _is_watched() -> bool:
    """Whether Dynamo compiles what this thread runs, as it does behind a break in its graphs, too."""
    return callable(eval_frame.get_eval_frame_callback())


eval_frame.set_code_exec_strategy(_is_watched.__code__, _PASSED)


def _is_hooked(step: Any) -> bool:
    """Whether it is the function by which PyTorch calls hooks around a step."""
    return getattr(step, "__code__", None) is _HOOKED


def _is_pytorchs(step: Any) -> bool:
    code = getattr(step, "__code__", None)
    return code is not None and code.co_filename.startswith(_PYTORCHS)


def _without_hooks(kind: Any) -> Any:
    return kind.step.__wrapped__ if _is_hooked(kind.step) else kind.step


def _put(kind: Any, step: Any) -> None:
    if _is_hooked(kind.step):
        step = Optimizer.profile_hook_step(step)
        step.hooked = True
    kind.step = step
