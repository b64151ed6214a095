"""Stands between the steps of PyTorch's optimizers and the hooks that PyTorch calls around each step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeAlias

from torch.compiler import is_compiling
from torch.optim import Optimizer

from torch_tiers.migrator.program.by_parameter import BY_PARAMETER

Step: TypeAlias = Callable[[], Any]

_run: Callable[[Optimizer, Step], Any] | None = None
_thread = threading.local()  # `within`: whether it makes a step of ours
_plain: dict[Any, Any] = {}  # by the functions of ours that stand before them


def install(run: Callable[[Optimizer, Step], Any]) -> None:
    """Have `run` make the steps of optimizers that update each parameter by itself, given what makes a whole step.

    A step with a closure is made as it comes: what the closure computes belongs to all parameters.
    """
    global _run
    _run = run
    for kind in _with_steps():
        if (plain := _without_hooks(kind)) not in _plain:
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


def _with_steps() -> list[Any]:
    """Those that have a step of their own. PyTorch gives a class one, with hooks, when its first instance is made."""
    return [kind for kind in BY_PARAMETER if "step" in vars(kind)]


def _before(plain: Any) -> Any:
    @wraps(plain)
    def step(self: Optimizer, closure: Any = None) -> Any:
        # Somebody may have put a function over ours that calls it, and a later session has put ours over that.
        if is_compiling() or closure is not None or _run is None or getattr(_thread, "within", False):
            return plain(self, closure)
        _thread.within = True
        try:
            return _run(self, partial(plain, self))
        finally:
            _thread.within = False

    return step


def _is_hooked(step: Any) -> bool:
    """Whether an optimizer has been made of the class: that puts a function around its step which calls hooks."""
    return bool(getattr(step, "hooked", False))


def _without_hooks(kind: Any) -> Any:
    return kind.step.__wrapped__ if _is_hooked(kind.step) else kind.step


def _put(kind: Any, step: Any) -> None:
    if _is_hooked(kind.step):
        step = Optimizer.profile_hook_step(step)
        step.hooked = True
    kind.step = step
