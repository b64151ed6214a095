"""Recomputation of whole modules: PyTorch's own non-reentrant checkpoint, put around `forward` from outside.

`forward` is replaced, not `__call__`: hooks of the module are called once. What the checkpoint saves, the tensors among
the arguments, comes to our hooks as sites of its own. While backward recomputes, modules have the attributes and
parameters that they had in forward, and what a recomputation makes of them is forgotten: a batch is counted once.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from migrator.packed import modified
from migrator.plan import checkpoint_key
from migrator.recompute.dropped import FOR_RECOMPUTING
from migrator.recompute.watch import OF_EVERY_MODULE, SETTINGS
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
        self._patched: dict[str, _Checkpointed] = {}
        self._refused: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # called in a way that cannot be repeated

    def know(self, path: str, module: nn.Module) -> bool:
        """Remember the module of a path; whether it can be recomputed as a whole."""
        if any(_is_compiled(child) or _observes(child) for child in module.modules()) or _has_hooks_within(module):
            return False
        if module in self._refused or not _is_plain(module):
            return False
        self._known[path] = weakref.ref(module)
        return True

    def apply(self, paths: Collection[str]) -> None:
        """From now on, recompute the modules of these paths and no others."""
        known = {path: self._known[path]() for path in paths if path in self._known}
        for path, patch in list(self._patched.items()):
            module = patch.module()
            if module is None or known.get(path) is not module:
                del self._patched[path]
                patch.on = False  # the program may have put its own `forward` around it, which is not ours to undo
                if module is not None and vars(module).get("forward") is patch:
                    del module.forward
        for path, module in known.items():
            if module is not None and path not in self._patched and _is_plain(module):
                module.forward = self._patched[path] = _Checkpointed(
                    module, path, self._modules, self._is_on, self._refused.add
                )


class _Checkpointed:
    """A `forward` that backward runs again. A copy of its module, or a pickled one, has the plain `forward`.

    It does not hold its module: that is to die with its last reference, as ever.

    Attributes
    ----------
    on : bool
        Whether to recompute.
    """

    def __init__(
        self,
        module: nn.Module,
        path: str,
        modules: Modules[Any],
        is_on: Callable[[], bool],
        refuse: Callable[[nn.Module], None],
    ) -> None:
        self._function = type(module).forward
        update_wrapper(self, self._function)
        self.module = weakref.ref(module)
        self.on = True
        self._inputs: Node[Any] = Node(checkpoint_key(path, 0).rpartition(":")[0], of_inputs=True)
        self._modules = modules
        self._is_on = is_on
        self._refuse = refuse

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.module()
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return self._function(module, *args, **kwargs)
        called = sys._getframe(1).f_locals.get("self")
        if called is not module and isinstance(called, nn.Module) and vars(called).get("forward") is self:
            return self._function(called, *args, **kwargs)  # a shallow copy, such as DataParallel makes, has it, too
        forward = MethodType(self._function, module)
        if not self.on or not torch.is_grad_enabled() or _graph_task() != -1 or not self._is_on() or _in_a_mode():
            return forward(*args, **kwargs)
        try:
            # Of tensors the checkpoint looks after itself; here they would only be held.
            given = [None if isinstance(arg, Tensor) else _copy(arg) for arg in args]
            named = {name: _copy(arg) for name, arg in kwargs.items()}
        except TypeError:
            given = None
        if given is None or _has_hooks_within(module):
            self._refuse(module)
            return forward(*args, **kwargs)
        modules = self._modules
        here, modules.here = modules.here, self._inputs  # what the checkpoint itself saves
        as_it_is, choices = _Snapshot(module, _tensors((*given, *named.values()))), _choices()

        def run(*args: Any) -> Any:
            if _graph_task() == -1:
                modules.here = here
                return forward(*args, **kwargs)
            # Containers may have changed since, and may change again.
            args = tuple(arg if own is None else _copy(own) for arg, own in zip(args, given, strict=True))
            with as_it_is.back(), _chosen(*choices):
                return forward(*args, **{name: _copy(own) for name, own in named.items()})

        try:
            return checkpoint(run, *args, use_reentrant=False)  # which has arguments by name of its own
        finally:
            modules.here = here

    # Whoever inspects a `forward`, such as TorchScript, finds the method that it was, with its code and its globals.

    __class__ = property(lambda self: MethodType)

    def __getattr__(self, name: str) -> Any:
        if name == "_function":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(MethodType(self._function, self.module()), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return MethodType(self._function, memo[id(self.module())])

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.module(), "forward")


class _Snapshot:
    """What a module and those within were when forward began: parameters, buffers, tensors, modes and other settings.

    Other attributes are not held: a list of tensors would hold the graph of an earlier step. That they are left alone
    until backward is what `migrator.recompute.watch` has seen.

    Parameters
    ----------
    given
        Tensors that forward is given, of which nobody else sees that they are changed.
    """

    def __init__(self, module: nn.Module, given: Iterable[Tensor]) -> None:
        self._modules = [(child, _settings(child)) for child in module.modules()]
        tensors: list[Tensor | None] = [*given]
        for child, was in self._modules:
            tensors += was["_parameters"].values()
            if not isinstance(child, _NormBase):  # which changes its own
                tensors += was["_buffers"].values()
        self._versions = [(t, t._version) for t in tensors if t is not None and not t.is_inference()]

    @contextmanager
    def back(self) -> Iterator[None]:
        """Have the modules be so again; what is done to their attributes meanwhile is forgotten.

        Raises
        ------
        RuntimeError
            If a parameter, a buffer, or what forward was given, has been changed since.
        """
        for tensor, version in self._versions:
            if tensor._version != version:
                raise modified(tensor, tensor.dtype, tensor.size(), version, FOR_RECOMPUTING)
        own = [(child, vars(child)) for child, _ in self._modules]
        for child, was in self._modules:
            buffers = was["_buffers"]
            if isinstance(child, _NormBase):  # which would count the batch a second time
                buffers = {name: None if t is None else t.clone() for name, t in buffers.items()}
            object.__setattr__(child, "__dict__", {**vars(child), **was, "_buffers": dict(buffers)})
        try:
            yield
        finally:
            for child, attributes in own:
                object.__setattr__(child, "__dict__", attributes)


def _settings(module: nn.Module) -> dict[str, Any]:
    own = vars(module)
    settings: dict[str, Any] = {"training": own["training"]}
    settings |= {"_parameters": dict(own["_parameters"]), "_buffers": dict(own["_buffers"])}
    for name in own.keys() - OF_EVERY_MODULE:
        value = own[name]
        if type(value) in SETTINGS:
            settings[name] = value
        elif isinstance(value, Tensor):
            settings[name] = value if value.grad_fn is None else value.detach().requires_grad_()  # without its graph
    return settings


_PLAIN = (Tensor, bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size)


def _copy(arg: Any) -> Any:
    """An argument that stays as it is when the program changes the containers in it.

    Raises
    ------
    TypeError
        If it is of a kind of which that cannot be told, such as a cache of keys and values.
    """
    if isinstance(arg, _PLAIN):
        return arg
    if type(arg) in (tuple, list, set):
        return type(arg)(map(_copy, arg))
    if type(arg) is dict:
        return {name: _copy(value) for name, value in arg.items()}
    raise TypeError(type(arg).__name__)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among what `_copy` has copied."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (tuple, list, set):
            yield from _tensors(value)
        elif type(value) is dict:
            yield from _tensors(value.values())


def changeable(arguments: Iterable[Any]) -> list[Tensor] | None:
    """The tensors that a forward is given; None if it could not be given these arguments again as they were."""
    try:
        return list(_tensors([_copy(argument) for argument in arguments]))
    except TypeError:
        return None


_SWITCHES = (
    *(
        (f"_get_{kernel}_sdp_enabled", f"_set_sdp_use_{kernel}")
        for kernel in ("flash", "mem_efficient", "math", "cudnn")
    ),
    *((f"_get_{switch}", f"_set_{switch}") for switch in ("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic")),
    ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
)


def _choices() -> tuple[torch.dtype, list[bool]]:
    """Default dtype, and the kernels that may be used: the program may have chosen them for forward only."""
    return torch.get_default_dtype(), [getattr(torch._C, get)() for get, _ in _SWITCHES]


def _choose(dtype: torch.dtype, switches: list[bool]) -> None:
    torch.set_default_dtype(dtype)
    for (_, switch), on in zip(_SWITCHES, switches, strict=True):
        getattr(torch._C, switch)(on)


@contextmanager
def _chosen(dtype: torch.dtype, switches: list[bool]) -> Iterator[None]:
    """Have the choices be these."""
    before = _choices()
    _choose(dtype, switches)
    try:
        yield
    finally:
        _choose(*before)


def _in_a_mode() -> bool:
    """Whether the program intercepts operations here: it need not do so in backward."""
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return any(not isinstance(mode, DeviceContext) for mode in modes)


def _has_hooks_within(module: nn.Module) -> bool:
    """Whether there are hooks around forwards within, other than ours: a recomputation would call these again."""
    if len(_global_forward_hooks) > 1 or len(_global_forward_pre_hooks) > 1:
        return True
    return any(child._forward_hooks or child._forward_pre_hooks for child in module.modules() if child is not module)


def _is_plain(module: nn.Module) -> bool:
    """Whether its `forward` is its class's. One of its own is somebody else's patch, and not ours to undo."""
    return "forward" not in vars(module) and isinstance(type(module).forward, FunctionType)


def _is_compiled(module: nn.Module) -> bool:
    return (
        isinstance(module, torch.jit.ScriptModule)
        or module._compiled_call_impl is not None
        or type(module).__name__ == "OptimizedModule"
    )


def _observes(module: nn.Module) -> bool:
    """Whether it keeps statistics for quantization: its kernels update them without counting a version."""
    return any(base.__module__.startswith("torch.ao.quantization") for base in type(module).__mro__)
