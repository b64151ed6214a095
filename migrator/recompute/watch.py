"""Whether a module's forward changes what a second one, in backward, would find changed, or change again.

`regions` gives modules back the numbers and names among their attributes. What it cannot undo is looked for
here: other attributes, global and captured names that are set anew; tensors, containers and generators that are changed
in place; and the random numbers of Python and NumPy. All that a forward can reach by its modules' attributes, and by
the globals and captured variables of the functions that they and their classes have, is compared before and after. That
is not all that a forward can do: a file that it writes to is not seen.
"""

from __future__ import annotations

import operator
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

SETTINGS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Kinds of values that cannot be changed in place, and hold nothing."""

_OWN = frozenset(vars(nn.Module()))  # what every module has
_CONTAINERS = (dict, list, set, deque)
_LIMIT = 1000  # things in a container up to which each is looked at
_ABSENT = object()


class Watch:
    """What the forward of a module could change, as it is now; `tensors` are those that it is given."""

    def __init__(self, module: nn.Module, tensors: Iterable[Tensor] = ()) -> None:
        self._seen: set[int] = set()
        self._kept: list[object] = []  # an id is good for as long as the object lives
        self._looks: list[tuple[Callable[[], Any], Any]] = []
        self._look(random.getstate)
        self._look(lambda: pickle.dumps(np.random.get_state()))
        self._look_at_all(tensors)
        for child in module.modules():
            self._look(partial(_attributes, child))
            self._look_at_all(_attributes(child))
            for function in _functions(type(child)):
                self._look_at(function)

    def unchanged(self) -> bool:
        """Whether all of it is what it was."""
        return all(_is_same(look(), before) for look, before in self._looks)

    def _look(self, look: Callable[[], Any]) -> None:
        self._looks.append((look, look()))

    def _look_at_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self._look_at(value)

    def _look_at(self, value: Any, depth: int = 2) -> None:
        """Look at what can be changed of a value without giving it another name."""
        kind = type(value)
        if id(value) in self._seen or isinstance(value, nn.Module) or kind in SETTINGS:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if isinstance(value, Tensor):
            if not value.is_inference():  # of those nobody counts the versions
                self._look(lambda: value._version)
        elif isinstance(value, torch.Generator):
            self._look(lambda: value.get_state().numpy().tobytes())
        elif isinstance(value, _CONTAINERS):
            self._look(lambda: _things(value))
            if depth and len(value) <= _LIMIT:
                for thing in value.values() if isinstance(value, dict) else value:
                    self._look_at(thing, depth - 1)
        elif isinstance(value, MethodType):
            self._look_at(value.__func__)
        elif isinstance(value, FunctionType):
            self._look_through(value)
        elif isinstance(value, random.Random):
            self._look(value.getstate)
        elif isinstance(value, np.random.Generator):
            self._look(lambda: pickle.dumps(value.bit_generator.state))
        elif depth and not isinstance(value, (type, ModuleType)) and isinstance(getattr(value, "__dict__", None), dict):
            self._look_at(vars(value), depth - 1)

    def _look_through(self, function: FunctionType) -> None:
        """Look at what a function can reach by name."""
        if _is_torch(function.__module__ or ""):
            return
        for cell in function.__closure__ or ():
            self._look(partial(_contents, cell))
            self._look_at(_contents(cell))
        there = function.__globals__
        for name in _names(function.__code__):
            if name in there:
                self._look(partial(there.get, name, _ABSENT))
                self._look_at(there[name], 1)


def _attributes(module: nn.Module) -> list[Any]:
    """The program's attributes that are more than settings; and the buffers."""
    own = vars(module)
    others = [value for name, value in own.items() if name not in _OWN and type(value) not in SETTINGS]
    return [*others, *own["_buffers"].values()] if not isinstance(module, _NormBase) else others


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return _ABSENT


def _things(container: Any) -> Any:
    if len(container) > _LIMIT:
        return len(container)
    return [*container, *container.values()] if isinstance(container, dict) else [*container]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, list):  # of things of which some may be tensors
        return len(one) == len(other) and all(map(operator.is_, one, other))
    return one is other or (isinstance(one, (int, bytes, tuple)) and bool(one == other))


def _is_torch(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "migrator", "tiers", "builtins")


def _functions(kind: type) -> Iterator[FunctionType]:
    """The functions that a module's class brings along, besides PyTorch's own."""
    for base in kind.__mro__:
        if not _is_torch(base.__module__):
            for value in vars(base).values():
                function = getattr(value, "__func__", value)
                if isinstance(function, FunctionType):
                    yield function


@cache
def _names(code: CodeType) -> frozenset[str]:
    """The names that code and the functions within it use."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(code.co_names).union(*inner)
