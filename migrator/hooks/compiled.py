"""Modules that the program has compiled: which they are, and what runs them where they are recomputed as a whole."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

Run = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Has a module's forward run, which is given with its arguments."""

_IN_PLACE = "_compiled_call_impl"  # where PyTorch looks for what `Module.compile` made

_DYNAMO = "torch._dynamo.eval_frame"  # to import it takes seconds, and the program may not need it


class Called:
    """In the place of what runs a compiled module; whoever inspects that finds the function that it was.

    It does not hold its module: that is to die with its last reference, as ever.

    Attributes
    ----------
    function : callable
        What was compiled.
    run : callable
        Who is to run that instead.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any], run: Run) -> None:
        self.function = function
        self.run = run
        self._module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Have it run."""
        module = self._module()
        if module is None or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return self.function(*args, **kwargs)
        return self.run(module, self.function, args, kwargs)

    __class__ = property(lambda self: FunctionType)

    def __getattr__(self, name: str) -> Any:
        if name == "function":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.function, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.function


def put_on(module: nn.Module, run: Run) -> None:
    """Have a module run by `run` that `may_run_twice`."""
    own, name = vars(module), _IN_PLACE if is_in_place(module) else "forward"
    own[name] = Called(module, own[name], run)


def take_off(module: nn.Module, run: Run) -> None:
    """Have it run by itself again; the program may have compiled it anew since."""
    own = vars(module)
    for name in (_IN_PLACE, "forward"):
        if isinstance(there := own.get(name), Called) and there.run == run:
            own[name] = there.function


def may_run_twice(module: nn.Module) -> bool:
    """Whether it is compiled, into what backward can have run again; and nobody has it run so already."""
    name = _IN_PLACE if is_in_place(module) else "forward" if is_wrapper(module) else None
    function = None if name is None else vars(module).get(name)
    return function is not None and not isinstance(function, Called) and not _graphs(function)


def _graphs(function: Any) -> bool:
    """Whether it runs CUDA graphs, which would be captured anew for what backward recomputes."""
    settings: Callable[[], dict[str, Any] | None] = getattr(function, "get_compiler_config", dict)
    inductor: Any = sys.modules.get("torch._inductor.config")
    return bool((settings() or {}).get("triton.cudagraphs") or (inductor and inductor.triton.cudagraphs))


def runs_compiled() -> bool:
    """Whether what is compiled runs as such now, and not eagerly, as `torch.compiler.set_stance` may have it."""
    stance = getattr(sys.modules.get(_DYNAMO), "_stance", None)  # PyTorch has no other way to ask
    return stance is None or stance.stance == "default"


def is_compiled(module: nn.Module) -> bool:
    """Whether it is compiled or scripted."""
    return isinstance(module, torch.jit.ScriptModule) or is_in_place(module) or is_wrapper(module)


def is_in_place(module: nn.Module) -> bool:
    """Whether it is compiled in place: with its own hooks, which are called whenever that runs."""
    return vars(module).get(_IN_PLACE) is not None


def is_wrapper(module: nn.Module) -> bool:
    """Whether it is what `torch.compile` puts around a module, and has no settings of its own."""
    wrapper = getattr(sys.modules.get(_DYNAMO), "OptimizedModule", None)  # where that is not loaded there is none
    return wrapper is not None and isinstance(module, wrapper)
