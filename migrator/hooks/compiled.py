"""Modules that the program has compiled: who tells that they are called, and what runs them.

Dynamo traces PyTorch's module hooks along with a module that is compiled in place (`Module.compile`), and ours find
nothing to do there: nobody would tell that it is called. A `Called` stands in front of what was compiled, and tells.
It is as well where such a module, or one that `torch.compile` has wrapped, is recomputed as a whole.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch import nn

Run = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Has a module's forward run, which is given with its arguments."""

_IN_PLACE = "_compiled_call_impl"  # where PyTorch looks for what `Module.compile` made

_DYNAMO = "torch._dynamo.eval_frame"  # to import it takes seconds, and the program may not need it

_called: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that are told of


class Called:
    """In the place of what runs a compiled module; whoever inspects that finds the function that it was.

    It does not hold its module: that is to die with its last reference, as ever.

    Attributes
    ----------
    function : callable
        What was compiled.
    run : callable or None
        Who is to run that instead, where the module is recomputed as a whole.
    """

    def __init__(
        self,
        module: nn.Module,
        function: Callable[..., Any],
        enter: Any = None,
        leave: Any = None,
        run: Run | None = None,
    ) -> None:
        self.function = function
        self.run = run
        self._module = weakref.ref(module)
        self._enter, self._leave = enter, leave

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, and tell of that."""
        module = self._module()
        if module is None or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return self.function(*args, **kwargs)
        if self._enter is None:
            return self._forward(module, args, kwargs)
        self._enter(module, args)
        try:
            output = self._forward(module, args, kwargs)
        except BaseException:
            self._leave(module, args, None)
            raise
        self._leave(module, args, kwargs, output)
        return output

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self.run
        return self.function(*args, **kwargs) if run is None else run(module, self.function, args, kwargs)

    __class__ = property(lambda self: FunctionType)

    def __getattr__(self, name: str) -> Any:
        if name == "function":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.function, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.function


def tell_of(modules: Iterable[nn.Module], enter: Any, leave: Any) -> None:
    """From now on have `enter` and `leave` called around the forwards of those that are compiled in place.

    Parameters
    ----------
    enter, leave
        As PyTorch calls hooks before and after the forward of any module; `leave` with None for the arguments by name
        where it raised.
    """
    for module in modules:
        own = vars(module)
        function = own.get(_IN_PLACE)
        if function is not None and not isinstance(function, Called):
            own[_IN_PLACE] = Called(module, function, enter, leave)
            _called.add(module)


def forget() -> None:
    """Leave all modules as they were."""
    for module in list(_called):
        own = vars(module)
        if isinstance(there := own.get(_IN_PLACE), Called):
            own[_IN_PLACE] = there.function
    _called.clear()


def put_on(module: nn.Module, run: Run) -> None:
    """Have a module run by `run` that `may_run_twice`."""
    own = vars(module)
    if is_in_place(module):
        own[_IN_PLACE].run = run
    else:
        own["forward"] = Called(module, own["forward"], run=run)


def take_off(module: nn.Module, run: Run) -> None:
    """Have it run by itself again; the program may have compiled it anew since."""
    own = vars(module)
    if isinstance(there := own.get(_IN_PLACE), Called) and there.run == run:
        there.run = None
    if isinstance(there := own.get("forward"), Called) and there.run == run:
        own["forward"] = there.function


def may_run_twice(module: nn.Module) -> bool:
    """Whether it is compiled, into what backward can have run again; and nobody has it run so already."""
    own = vars(module)
    if is_in_place(module):
        function = own[_IN_PLACE]
        return isinstance(function, Called) and function.run is None and not _graphs(function)
    return (
        is_wrapper(module)
        and "forward" in own
        and not isinstance(own["forward"], Called)
        and not _graphs(own["forward"])
    )


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
