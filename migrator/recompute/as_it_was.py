"""What a forward finds when backward repeats it: its modules as they were, and the kernels that it was told to use."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from types import BuiltinFunctionType, FunctionType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from torch_tiers.migrator.hooks.compiled import is_wrapper
from torch_tiers.migrator.hooks.packed import modified
from torch_tiers.migrator.recompute import exact
from torch_tiers.migrator.recompute.choices import choices, chosen
from torch_tiers.migrator.recompute.dropped import FOR_RECOMPUTING
from torch_tiers.migrator.recompute.numbers import GENERATORS, Numbers
from torch_tiers.migrator.recompute.watch import CONTAINERS, OF_EVERY_MODULE, SETTINGS, keeps_statistics

_WITHOUT_TENSORS = (np.ndarray, np.generic, Enum, Decimal, Fraction, FunctionType, BuiltinFunctionType, type)
_PLAIN = (Tensor, nn.Parameter)
_DICTS = (
    "_modules",
    *(f"_{when}_hooks{what}" for when in ("forward", "forward_pre") for what in ("", "_with_kwargs")),
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
)
MOST = 100  # things in a container that is given back what it held


class Snapshot:
    """What a module and those within were when forward began: parameters, buffers, tensors, modes and other settings.

    Containers of settings and generators of its own are, too. What may hold tensors is not held: that would hold the
    graph of an earlier step. That it is left alone until backward is what `migrator.recompute.watch` has seen.

    Parameters
    ----------
    given
        Tensors that forward is given, of which nobody else sees that they are changed.
    give_up
        Called where it cannot be as it was, with whether it is never to be tried again.
    path
        The module's, for errors.
    draws
        Whether forward may draw random numbers.
    """

    def __init__(
        self,
        module: nn.Module,
        given: Iterable[Tensor],
        give_up: Callable[[bool], None] = lambda _: None,
        *,
        path: str = "a module",
        draws: bool = True,
    ) -> None:
        self._give_up = give_up
        self._path = path
        self._modules = [(child, _settings(child)) for child in module.modules() if not is_wrapper(child)]
        self._kinds = [(type(child), frozenset(vars(child))) for child, _ in self._modules]
        tensors: list[Tensor | None] = [*given]
        for child, was in self._modules:
            tensors += was["_parameters"].values()
            tensors += (value for value in was.values() if isinstance(value, Tensor))
            if not keeps_statistics(child):  # which changes its own
                tensors += was["_buffers"].values()
        # Lists of one kind each: pairs would be objects that Python's garbage collector looks at.
        self._tensors = [t for t in tensors if t is not None and not t.is_inference()]
        self._versions = [t._version for t in self._tensors]
        self._parameters = [t for _, was in self._modules for t in was["_parameters"].values() if t is not None]
        self._wants_grad = [t.requires_grad for t in self._parameters]
        # Who sets `.data` counts no version. It holds no more than a graph does, which saves what it had.
        self._data = [p.detach() if type(p) in _PLAIN and p.layout is torch.strided else p for p in self._parameters]
        # For backward Linear saves views of its weight. Others save a parameter itself, of which plain backward finds
        # the new data.
        self._linear = [
            type(child) is nn.Linear
            for child, was in self._modules
            for p in was["_parameters"].values()
            if p is not None
        ]
        self._choices = choices()
        generators: list[Any] = []
        self._containers: list[tuple[Any, Any]] = []
        for child, _ in self._modules:
            for name in (own := vars(child)).keys() - OF_EVERY_MODULE:
                value = own[name]
                if type(value) in CONTAINERS and _holds_settings(value):
                    self._containers.append((value, value.copy()))
                elif isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom):
                    generators.append(value)
        # What drew no number while it was watched may do so later, as a probability that is raised step by step.
        self._numbers = Numbers(generators) if draws else None

    @contextmanager
    def back(self) -> Iterator[None]:
        """Have the modules be so again; what is done to their attributes meanwhile is forgotten.

        Raises
        ------
        RuntimeError
            If a parameter, a buffer, or what forward was given, has been changed since; or what cannot be given back.
        """
        for tensor, version in zip(self._tensors, self._versions, strict=True):
            if tensor._version != version:
                self._give_up(False)
                hint = f"{FOR_RECOMPUTING} Of its module {self._path} all is recomputed."
                raise modified(tensor, tensor.dtype, tensor.size(), version, hint)
        others: list[tuple[Tensor, Tensor, Tensor]] = []
        for parameter, then, linear in zip(self._parameters, self._data, self._linear, strict=True):
            if _is_other(parameter, then):
                if not (linear and _fits(parameter, then)):
                    self._refuse("the `.data` of its parameters")
                others.append((parameter, then, parameter.detach()))
        if _global_forward_hooks or _global_forward_pre_hooks or not exact.stands(kind for kind, _ in self._kinds):
            self._refuse("functions or methods of PyTorch's that it calls, or hooks of all modules")
        now = [(child, type(child), vars(child)) for child, _ in self._modules]
        try:
            for (child, was), (kind, names) in zip(self._modules, self._kinds, strict=True):
                buffers = was["_buffers"]
                if keeps_statistics(child):  # which would count the batch a second time
                    buffers = {name: None if t is None else t.clone() for name, t in buffers.items()}
                own = {name: value for name, value in vars(child).items() if name in names}
                dicts = {name: was[name].copy() for name in _DICTS}
                object.__setattr__(child, "__dict__", {**own, **was, **dicts, "_buffers": dict(buffers)})
                _be(child, kind)
            for p, then, _ in others:
                p.data = then
            with (
                chosen(self._choices),
                nullcontext() if self._numbers is None else self._numbers.again(),
                _wanting(zip(self._parameters, self._wants_grad, strict=True)),
                _holding(self._containers),
            ):
                yield
        finally:
            for p, _, data in others:
                p.data = data
            for child, kind, attributes in now:
                object.__setattr__(child, "__dict__", attributes)
                _be(child, kind)

    def _refuse(self, what: str) -> NoReturn:
        self._give_up(True)
        raise RuntimeError(
            f"{self._path} cannot be recomputed in backward: the program has changed {what} since forward, and other "
            "gradients would come of it. Change them after backward, or choose a policy that recomputes nothing, such "
            "as TIERS_POLICY=flashneuron."
        )


def _is_other(parameter: Tensor, then: Tensor) -> bool:
    """Whether it has been given other data than it had then."""
    if then is parameter:  # of a kind of which that cannot be told
        return False
    return not (
        parameter.data_ptr() == then.data_ptr() and _fits(parameter, then) and parameter.stride() == then.stride()
    )


def _fits(parameter: Tensor, data: Tensor) -> bool:
    return (parameter.dtype, parameter.device, parameter.shape) == (data.dtype, data.device, data.shape)


def _be(module: nn.Module, kind: type) -> None:
    if type(module) is not kind:
        object.__setattr__(module, "__class__", kind)


def standing(module: nn.Module) -> dict[Any, Any]:
    """Modes and settings of a module, of those within, and of those that it has in a list or by another name."""
    found: dict[Any, Any] = {}
    for path, child in module.named_modules():
        if is_wrapper(child):
            continue
        own = vars(child)
        found[path, "training"] = own.get("training")
        for name in own.keys() - OF_EVERY_MODULE:
            if type(value := own[name]) in SETTINGS:
                found[path, name] = value
            elif type(value) in (list, tuple, dict) and len(value) <= MOST:
                for k, thing in enumerate(_things(value)):
                    if issubclass(type(thing), nn.Module):  # not what it says itself: it may be a proxy
                        found[path, name, k] = vars(thing).get("training")
    return found


def _things(container: Any) -> list[Any]:
    """What it holds, at once: another thread may be changing it."""
    return list(container.values() if type(container) is dict else container)


def same(one: Any, other: Any) -> bool:
    """Whether two settings are one to a forward, which may tell 1 from 1.0."""
    return type(one) is type(other) and (one == other or one != one)  # or not a number


def _settings(module: nn.Module) -> dict[str, Any]:
    own = vars(module)
    settings: dict[str, Any] = {"training": own["training"]}
    settings |= {"_parameters": dict(own["_parameters"]), "_buffers": dict(own["_buffers"])}
    settings |= {name: own[name].copy() for name in _DICTS}
    for name in own.keys() - OF_EVERY_MODULE:
        value = own[name]
        if isinstance(value, Tensor):
            settings[name] = value if value.grad_fn is None else value.detach().requires_grad_()  # without its graph
        elif _holds_no_graph(value):
            settings[name] = value  # which forward found by that name, whatever the program puts there until backward
    return settings


def _holds_no_graph(value: Any) -> bool:
    """Whether it may live until backward: what holds a tensor may hold the graph of an earlier step with it."""
    kind = type(value)
    if kind in SETTINGS or issubclass(kind, _WITHOUT_TENSORS):
        return True
    if kind in CONTAINERS or kind in (tuple, frozenset):
        return _holds_settings(value)
    try:
        own = object.__getattribute__(value, "__dict__")  # its own: it may be a proxy, or answer to any name
    except AttributeError:
        return False
    return bool(own) and type(own) is dict and _holds_settings(own)


@contextmanager
def _holding(containers: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Have containers hold what they did; what is put into them meanwhile is forgotten."""
    before = [(container, container.copy()) for container, _ in containers]
    _fill(containers)
    try:
        yield
    finally:
        _fill(before)


def _fill(containers: Iterable[tuple[Any, Any]]) -> None:
    for container, things in containers:
        if container != things:
            container.clear()
            (container.update if isinstance(container, (dict, set)) else container.extend)(things)


def _holds_settings(container: Any) -> bool:
    """Whether it holds numbers and names alone: to hold a tensor would hold the graph of an earlier step."""
    return len(container) <= MOST and all(type(thing) in SETTINGS for thing in _things(container))


@contextmanager
def _wanting(flags: Iterable[tuple[Tensor, bool]]) -> Iterator[None]:
    """Have parameters want gradients or not as they did: one that is frozen between would save other tensors."""
    others = [(tensor, was) for tensor, was in flags if tensor.requires_grad != was and tensor.is_leaf]
    for tensor, was in others:
        tensor.requires_grad_(was)
    try:
        yield
    finally:
        for tensor, was in others:
            tensor.requires_grad_(not was)
