"""Stands before PyTorch's loading of optimizer state."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from torch.compiler import is_compiling
from torch.optim import Optimizer

_plain: Any = None  # what it was when ours was put over it
_ours: Any = None


def install(loading: Callable[[Optimizer], AbstractContextManager[None]]) -> None:
    """Have optimizers load their state within the scope that `loading` returns."""
    global _plain, _ours
    plain = _plain = Optimizer.load_state_dict

    @wraps(plain)
    def load_state_dict(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        # Whoever has kept this function may call it when it is of no session any more.
        if is_compiling() or _ours is not load_state_dict:
            return plain(self, *args, **kwargs)
        with loading(self):
            return plain(self, *args, **kwargs)

    _ours = load_state_dict
    Optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]


def uninstall() -> None:
    """Undo `install`."""
    global _plain, _ours
    if _ours is not None and Optimizer.load_state_dict is _ours:  # else somebody has put another over it since
        Optimizer.load_state_dict = _plain  # type: ignore[method-assign]
    _plain = _ours = None
