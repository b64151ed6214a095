"""Recomputation of whole modules: PyTorch's own non-reentrant checkpoint, put around `forward` from outside.

`forward` is replaced, not `__call__`: hooks of the module are called once. Of a module that the program has compiled,
what was compiled runs again. What the checkpoint saves, the tensors among the arguments, comes to our hooks as
sites of its own. While backward recomputes, modules have the attributes and
parameters that they had in forward, and what a recomputation makes of them is forgotten: a batch is counted once.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from contextvars import copy_context
from copy import deepcopy
from functools import partial, update_wrapper
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from torch_tiers.migrator.hooks import compiled
from torch_tiers.migrator.hooks.sites import Modules, Node
from torch_tiers.migrator.recompute import exact
from torch_tiers.migrator.recompute.arguments import copy_of, tensors_in
from torch_tiers.migrator.recompute.as_it_was import Snapshot, same, standing
from torch_tiers.migrator.recompute.catches import catches
from torch_tiers.migrator.trace import checkpoint_key

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
        self._entered: weakref.WeakKeyDictionary[nn.Module, dict[Any, Any]] = weakref.WeakKeyDictionary()
        self._standing: weakref.WeakKeyDictionary[nn.Module, dict[Any, Any]] = weakref.WeakKeyDictionary()
        self._patched: dict[str, _Checkpointed] = {}
        self._refused: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # called in a way that cannot be repeated
        self._given_up: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # until seen to be such again as can be

    def know(self, path: str, module: nn.Module) -> bool:
        """Remember the module of a path; whether it can be recomputed as a whole."""
        if not exact.is_exact(module):
            return False
        if any(compiled.is_compiled(child) for child in module.modules() if child is not module):
            return False
        if any(map(_observes, module.modules())) or _has_hooks(module):
            return False
        if module in self._refused or not (_is_plain(module) or compiled.may_run_twice(module)):
            return False
        self._known[path] = weakref.ref(module)
        self._entered[module] = standing(module)
        return True

    def seen(self, module: nn.Module, *, repeatable: bool) -> None:
        """The forward of a module that is known is over, and can be repeated, or not, as far as is known by now."""
        entered = self._entered.pop(module, {})
        if not repeatable:
            self._given_up.add(module)
            return
        self._given_up.discard(module)
        # Those settings matter that it has left alone, unless it was seen to be repeatable with others as well.
        now, before = standing(module), self._standing.get(module, entered)
        self._standing[module] = {
            key: value
            for key, value in entered.items()
            if key in before and same(before[key], value) and same(now.get(key), value)
        }

    def apply(self, paths: Collection[str]) -> None:
        """From now on, recompute the modules of these paths and no others."""
        known = {path: self._known[path]() for path in paths if path in self._known}
        for path, patch in list(self._patched.items()):
            module = patch.module()
            if module is None or known.get(path) is not module:
                del self._patched[path]
                patch.take_off()
        for path, module in known.items():
            if module is None or path in self._patched or module in self._given_up:
                continue
            kind = _Method if _is_plain(module) else _Compiled if compiled.may_run_twice(module) else None
            if kind is not None:
                stands = self._standing.get(module, {})
                self._patched[path] = kind(module, path, self._modules, self._is_on, self._give_up, stands)
                self._patched[path].put_on()

    def _give_up(self, patch: _Checkpointed, for_good: bool) -> None:
        """From now on its module runs as it did; unless that is for good, another recording may tell otherwise."""
        self._patched = {path: one for path, one in self._patched.items() if one is not patch}
        self._known.pop(patch.path, None)
        patch.take_off()
        if (module := patch.module()) is not None:
            (self._refused if for_good else self._given_up).add(module)


class _Checkpointed:
    """What has a module's forward run again in backward.

    It does not hold its module: that is to die with its last reference, as ever.

    Attributes
    ----------
    on : bool
        Whether to recompute.
    path : str
        The module's.
    """

    _runs_by = exact.IN_PLACE  # the attribute of the module's that this is put on

    def __init__(
        self,
        module: nn.Module,
        path: str,
        modules: Modules[Any],
        is_on: Callable[[], bool],
        give_up: Callable[[_Checkpointed, bool], None],
        stands: Mapping[Any, Any],
    ) -> None:
        self.module = weakref.ref(module)
        self.on = True
        self._inputs: Node[Any] = Node(checkpoint_key(path, 0).rpartition(":")[0], of_inputs=True)
        self._modules = modules
        self._is_on = is_on
        self.path = path
        self._give_up = give_up
        self._stands = stands  # settings that never changed while its forward was seen to be one that can be repeated
        self._early = not catches(module)

    def put_on(self) -> None:
        """Be what runs the module's forward."""
        raise NotImplementedError

    def take_off(self) -> None:
        """Have it run as it did."""
        raise NotImplementedError

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module's forward, and have backward do so again, if nothing forbids that."""
        if not self.on or not torch.is_grad_enabled() or _graph_task() != -1 or not self._is_on() or _in_a_mode():
            return forward(*args, **kwargs)
        try:
            # Of tensors the checkpoint looks after itself; here they would only be held.
            given = [None if isinstance(arg, Tensor) else copy_of(arg) for arg in args]
            named = {name: copy_of(arg) for name, arg in kwargs.items()}
        except TypeError:
            given = None
        own = self._runs_by
        if (
            given is None
            or _has_hooks(module)
            or not exact.is_exact(module, tensors_in((*args, *kwargs.values())), own)
        ):
            self._give_up(self, True)
            return forward(*args, **kwargs)
        if not self._is_as_seen(module):
            return forward(*args, **kwargs)
        # What is given twice is one object again: attention takes another way where `q is k`.
        first = {id(arg): k for k, arg in reversed(list(enumerate(args)))}
        numbers = [first[id(arg)] for arg in args]
        also = {name: first[id(arg)] for name, arg in kwargs.items() if isinstance(arg, Tensor) and id(arg) in first}
        context = copy_context()
        place = self._modules.place
        here, place.here = place.here, self._inputs  # what the checkpoint itself saves
        draws = exact.may_draw()
        tensors = tensors_in((*given, *named.values()))
        as_it_is = Snapshot(module, tensors, partial(self._give_up, self), path=self.path, draws=draws)

        def run(*args: Any) -> Any:
            if _graph_task() == -1:
                place.here = here
                return forward(*args, **kwargs)
            # Containers may have changed since, and may change again.
            again = [args[k] if given[k] is None else copy_of(given[k]) for k in numbers]
            by_name = {name: args[also[name]] if name in also else copy_of(own) for name, own in named.items()}
            with as_it_is.back():
                return context.copy().run(forward, *again, **by_name)  # what is set around a forward alone

        try:
            with nullcontext() if self._early else set_checkpoint_early_stop(False):
                # Which has arguments by name of its own; and to set generators back is seen by other threads.
                return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=draws)
        finally:
            place.here = here

    def _is_as_seen(self, module: nn.Module) -> bool:
        """Whether its settings are those with which it was seen: with others it may do what cannot be undone."""
        now = standing(module)
        return all(same(now.get(key), value) for key, value in self._stands.items())


class _Compiled(_Checkpointed):
    """Of a module that is compiled."""

    def put_on(self) -> None:
        """Have what was compiled run by this."""
        module = self.module()
        if module is not None:
            compiled.put_on(module, self.run)

    def take_off(self) -> None:
        """Have it run by itself."""
        self.on = False
        module = self.module()
        if module is not None:
            compiled.take_off(module, self.run)

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same, unless it runs eagerly for now: backward, which may not, would save other tensors."""
        if not compiled.runs_compiled():
            return forward(*args, **kwargs)
        return super().run(module, forward, args, kwargs)


class _Method(_Checkpointed):
    """A `forward` that backward runs again. A copy of its module, or a pickled one, has the plain `forward`."""

    _runs_by = "forward"

    def __init__(self, module: nn.Module, *rest: Any) -> None:
        self._function = type(module).forward
        update_wrapper(self, self._function)
        super().__init__(module, *rest)

    def put_on(self) -> None:
        """Be the module's `forward`."""
        module = self.module()
        if module is not None:
            module.forward = self

    def take_off(self) -> None:
        """Leave the module its class's; if the program has put its own around this one, that is not ours to undo."""
        self.on = False
        module = self.module()
        if module is not None and vars(module).get("forward") is self:
            del module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.module()
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return self._function(module, *args, **kwargs)
        called = sys._getframe(1).f_locals.get("self")
        if called is not module and isinstance(called, nn.Module) and vars(called).get("forward") is self:
            return self._function(called, *args, **kwargs)  # a shallow copy, such as DataParallel makes, has it, too
        if type(module).forward is not self._function:  # the program has given its class another, or it another class
            wrapped = vars(module).get("forward") is not self  # by the program, which has kept this method
            self._give_up(self, False)
            return (self._function if wrapped else type(module).forward)(module, *args, **kwargs)
        return self.run(module, MethodType(self._function, module), args, kwargs)

    # Whoever inspects a `forward`, such as TorchScript, finds the method that it was, with its code and its globals.

    __class__ = property(lambda self: MethodType)

    def __getattr__(self, name: str) -> Any:
        if name == "_function":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(MethodType(self._function, self.module()), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return MethodType(self._function, deepcopy(self.module(), memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.module(), "forward")


def _in_a_mode() -> bool:
    """Whether the program intercepts operations here: it need not do so in backward."""
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return any(not isinstance(mode, DeviceContext) for mode in modes)


def _has_hooks(module: nn.Module) -> bool:
    """Whether there are hooks around its forward, or around those within: these a recomputation would call again.

    Its own it would not; but what they hand in and save we are told of as if it were its forward's.
    """
    if _global_forward_hooks or _global_forward_pre_hooks:
        return True
    return any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())


def _is_plain(module: nn.Module) -> bool:
    """Whether its `forward` is its class's. One of its own is somebody else's patch, and not ours to undo."""
    return (
        not compiled.is_compiled(module)
        and "forward" not in vars(module)
        and isinstance(type(module).forward, FunctionType)
    )


def _observes(module: nn.Module) -> bool:
    """Whether it keeps statistics for quantization: its kernels update them without counting a version."""
    return any(base.__module__.startswith("torch.ao.quantization") for base in type(module).__mro__)
