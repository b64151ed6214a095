"""Recomputation of whole modules: PyTorch's own non-reentrant checkpoint, put around `forward` from outside.

`forward` is replaced, not `__call__`: hooks of the module are called once. What the checkpoint saves, the tensors among
the arguments, comes to our hooks as sites of its own. While backward recomputes, statistics that normalisations keep
are set aside, so that a batch is counted once.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from migrator.plan import checkpoint_key
from migrator.sites import Modules, Node

_graph_task = torch._C._current_graph_task_id


class Regions:
    """The modules of one thread's program that are recomputed as a whole.

    Parameters
    ----------
    modules : Modules
        Where the thread is.
    is_on : callable
        Whether the thread that asks is that thread, and nothing forbids to recompute.
    """

    def __init__(self, modules: Modules[Any], is_on: Callable[[], bool]) -> None:
        self._modules = modules
        self._is_on = is_on
        self._known: dict[str, weakref.ref[nn.Module]] = {}
        self._patched: dict[str, weakref.ref[nn.Module]] = {}

    def know(self, path: str, module: nn.Module) -> bool:
        """Remember the module of a path; whether it can be recomputed as a whole.

        Not if it is compiled, or if the program has hooks on modules within it, which would be called again.
        """
        if any(_is_compiled(child) or (child is not module and _has_hooks(child)) for child in module.modules()):
            return False
        self._known[path] = weakref.ref(module)
        return True

    def apply(self, paths: Collection[str]) -> None:
        """From now on, recompute the modules of these paths and no others."""
        for path in [path for path in self._patched if path not in paths]:
            module = self._patched.pop(path)()
            if module is not None:
                del module.forward
        for path in paths:
            module = self._known[path]() if path in self._known else None
            # A `forward` of the instance's own is somebody else's patch: not ours to undo.
            if module is not None and path not in self._patched and "forward" not in vars(module):
                module.forward = _Checkpointed(module, path, self._modules, self._is_on)
                self._patched[path] = weakref.ref(module)


class _Checkpointed:
    """A `forward` that backward runs again. A copy of its module, or a pickled one, has the plain `forward`."""

    def __init__(self, module: nn.Module, path: str, modules: Modules[Any], is_on: Callable[[], bool]) -> None:
        update_wrapper(self, module.forward)
        self._forward = module.forward
        self._module = weakref.ref(module)
        self._inputs: Node[Any] = Node(checkpoint_key(path, 0).rpartition(":")[0], of_inputs=True)
        self._modules = modules
        self._is_on = is_on

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or _graph_task() != -1 or not self._is_on():
            return self._forward(*args, **kwargs)
        modules = self._modules
        here, modules.here = modules.here, self._inputs  # what the checkpoint itself saves

        def run(*args: Any, **kwargs: Any) -> Any:
            if _graph_task() == -1:
                modules.here = here
                return self._forward(*args, **kwargs)
            module = self._module()
            assert module is not None, "its forward holds it"
            with statistics_aside(module):
                return self._forward(*args, **kwargs)

        try:
            return checkpoint(run, *args, use_reentrant=False, **kwargs)
        finally:
            modules.here = here

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module: Any = self._module()
        return MethodType(type(module).forward, memo[id(module)])

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module(), "forward")


@contextmanager
def statistics_aside(module: nn.Module) -> Iterator[None]:
    """Have normalisations update copies of their running statistics."""
    norms = [child for child in module.modules() if isinstance(child, _NormBase) and child.training]
    own = [dict(norm._buffers) for norm in norms]
    for norm in norms:
        norm._buffers.update({name: None if t is None else t.clone() for name, t in norm._buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in zip(norms, own, strict=True):
            norm._buffers.update(buffers)


def state_of(module: nn.Module, tensors: Iterable[Tensor]) -> list[object]:
    """What a forward may change besides making its result: one that does cannot be run again.

    These are its arguments, buffers that are no running statistics, attributes of the program's own modules (of what
    lies in a container only how much it is), and random numbers of Python and NumPy, which no checkpoint sets back.
    """
    state: list[object] = [version(tensor) for tensor in tensors]
    state += (random.getstate(), _numpy_state())
    for child in module.modules():
        if not isinstance(child, _NormBase):
            state += map(_mark, child._buffers.values())
        if not type(child).__module__.startswith("torch.nn."):
            state += map(_mark, vars(child).values())
    return state


def leaves_alone(arguments: Iterable[object]) -> bool:
    """Whether a forward has surely put nothing into its arguments that it would find there when it is run again.

    What is no plain data, such as a cache of keys and values, may have grown; a list that is empty has not.
    """
    return all(
        isinstance(argument, _PLAIN)
        or (isinstance(argument, tuple) and leaves_alone(argument))
        or (isinstance(argument, list | dict) and not argument)
        for argument in arguments
    )


_PLAIN = (Tensor, bool, int, float, str, torch.dtype, torch.device, type(None))


def _mark(value: object) -> object:
    if isinstance(value, Tensor):
        return id(value), version(value)
    if isinstance(value, _PLAIN):
        return value
    return id(value), len(value) if isinstance(value, list | dict | set | deque) else 0


def version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; 0 for those of inference mode, which nobody counts."""
    return 0 if tensor.is_inference() else tensor._version


def _numpy_state() -> object:
    numpy: Any = sys.modules.get("numpy.random")  # importing it is the program's affair
    if numpy is None:
        return None
    _, key, position, *_ = numpy.get_state()
    return int(key[0]), position


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _is_compiled(module: nn.Module) -> bool:
    return (
        isinstance(module, torch.jit.ScriptModule)
        or module._compiled_call_impl is not None
        or type(module).__name__ == "OptimizedModule"
    )
