"""Stands before PyTorch's loading of optimizer state."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Protocol, TypeAlias

from torch import Tensor
from torch.compiler import is_compiling
from torch.optim import Optimizer

_plain: tuple[Any, Any] | None = None  # what the two were when ours were put over them
_ours: tuple[Any, Any] | None = None
_thread = threading.local()  # `loaded`: of the optimizer that loads its state

ReplaceLoaded: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""``f(parameter, value)``: what the optimizer's state of a parameter is to have in place of a loaded value."""


class Loading(Protocol):
    """What is told of a load."""

    def __call__(self, optimizer: Optimizer, given: object, /) -> AbstractContextManager[ReplaceLoaded]:
        """An optimizer loads its state within this scope, which yields what replaces a loaded value.

        `given` is what it loads, as a rule a state dict. Nobody has looked at it yet.
        """


def install(loading: Loading) -> None:
    """Have optimizers load their state within the scope that `loading` returns."""
    global _plain, _ours
    plain, plain_process = _plain = Optimizer.load_state_dict, Optimizer._process_value_according_to_param_policy

    @wraps(plain)
    def load_state_dict(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        # Whoever has kept this function may call it when it is of no session any more.
        if is_compiling() or _ours is None or _ours[0] is not load_state_dict:
            return plain(self, *args, **kwargs)
        around = getattr(_thread, "loaded", None)
        with loading(self, args[0] if args else kwargs.get("state_dict")) as _thread.loaded:
            try:
                return plain(self, *args, **kwargs)
            finally:
                _thread.loaded = around

    @wraps(plain_process)
    def process(param: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        processed, loaded = plain_process(param, value, *args, **kwargs), getattr(_thread, "loaded", None)
        return processed if loaded is None else loaded(param, processed)

    _ours = load_state_dict, process
    _put(*_ours)


def uninstall() -> None:
    """Undo `install`."""
    global _plain, _ours
    if _ours is not None and _plain is not None and Optimizer.load_state_dict is _ours[0]:
        _put(*_plain)  # else somebody has put another over it since
    _plain = _ours = None


def _put(load: Any, process: Any) -> None:
    Optimizer.load_state_dict = load  # type: ignore[method-assign]
    Optimizer._process_value_according_to_param_policy = staticmethod(process)  # type: ignore[method-assign]
