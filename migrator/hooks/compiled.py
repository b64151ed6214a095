"""Modules that the program has compiled, by themselves or within others: who calls them, and what runs them.

Dynamo traces PyTorch's module hooks along with a module that is compiled in place (`Module.compile`), and ours find
nothing to do there: nobody would tell that it is called. A `Called` stands in front of what was compiled, and tells.
It is as well where such a module, or one that `torch.compile` has wrapped, is recomputed as a whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

Run = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Has a module's forward run, which is given with its arguments."""

_IN_PLACE = "_compiled_call_impl"  # where PyTorch looks for what `Module.compile` made
_WRAPPED = "OptimizedModule"  # the class of what `torch.compile` makes of a module; to import that takes seconds

_called: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that have one


class Called:
    """In the place of what runs a compiled module.

    It does not hold its module: that is to die with its last reference, as ever. A copy of the module has none.

    Attributes
    ----------
    function : callable
        What was compiled.
    run : callable or None
        Who is to run that instead, where the module is recomputed as a whole.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any], enter: Any = None, leave: Any = None) -> None:
        self.function = function
        self.run: Run | None = None
        self._module = weakref.ref(module)
        self._enter, self._leave = enter, leave

    @property
    def graphs(self) -> bool:
        """Whether it runs CUDA graphs: what is recomputed would overwrite what they keep for backward."""
        settings: Callable[[], dict[str, Any] | None] = getattr(self.function, "get_compiler_config", dict)
        return bool((settings() or {}).get("triton.cudagraphs"))

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
        if function is not None:
            if not isinstance(function, Called):
                own[_IN_PLACE] = Called(module, function, enter, leave)
                _called.add(module)
        elif is_wrapper(module) and not isinstance(own["forward"], Called):
            own["forward"] = Called(module, own["forward"])  # hooks of this one are called
            _called.add(module)


def forget() -> None:
    """Leave all modules as they were."""
    for module in list(_called):
        own = vars(module)
        for name in (_IN_PLACE, "forward"):
            if isinstance(called := own.get(name), Called):
                own[name] = called.function
    _called.clear()


def is_compiled(module: nn.Module) -> bool:
    """Whether what runs it is no code of Python's."""
    return isinstance(module, torch.jit.ScriptModule) or brings_hooks(module) or is_wrapper(module)


def is_within_compiled(root: nn.Module, path: str) -> bool:
    """Whether a module that contains the one at `path` is compiled: what runs this one, too, may be Dynamo's.

    Parameters
    ----------
    path
        From the root's own name on; see `migrator.hooks.sites`.
    """
    module: nn.Module | None = root
    for name in path.split(".")[1:]:
        if module is None or is_compiled(module):
            break
        module = module._modules.get(name)
    else:
        return False
    return module is not None


def is_wrapper(module: nn.Module) -> bool:
    """Whether it is what `torch.compile` puts around a module, and has no settings of its own."""
    return type(module).__name__ == _WRAPPED


def called(module: nn.Module) -> Called | None:
    """What runs a module that is compiled."""
    own = vars(module)
    found = own.get(_IN_PLACE) or own.get("forward")
    return found if isinstance(found, Called) else None


def brings_hooks(module: nn.Module) -> bool:
    """Whether the module's own hooks were compiled along with it, and are called whenever that is."""
    return vars(module).get(_IN_PLACE) is not None
