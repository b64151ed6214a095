"""Whether a module's forward may catch an exception that is thrown through it.

PyTorch's checkpoint ends a recomputation by one, as soon as all is there that backward needs: who catches that takes it
for a failure of his own, and goes another way in backward than in forward.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType, MethodType, ModuleType

from torch import nn

from torch_tiers.migrator.recompute.watch import contents_of, functions_of, is_torch, names_in


def catches(module: nn.Module) -> bool:
    """Whether there is a handler in the forward of a module, of those within, or in what these call by name."""
    seen: set[int] = set()
    methods: dict[str, list[FunctionType]] = {}
    for kind in {type(child) for child in module.modules()}:
        for function in functions_of(kind):
            methods.setdefault(function.__name__, []).append(function)
    todo = [*methods.get("forward", ()), *methods.get("__call__", ())]
    while todo:
        function = todo.pop()
        if id(function) in seen or is_torch(function.__module__ or ""):
            continue
        seen.add(id(function))
        if _handles(function.__code__):
            return True
        todo += _called_by(function)
        todo += (method for name in names_in(function.__code__) for method in methods.get(name, ()))
    return False


def _called_by(function: FunctionType) -> Iterator[FunctionType]:
    """Functions that it can reach by the names it uses, or has captured, or wraps."""
    held = [contents_of(cell) for cell in function.__closure__ or ()]
    there = [function.__globals__.get(name) for name in names_in(function.__code__)]
    modules = [value for value in there if type(value) is ModuleType and not is_torch(value.__name__)]
    there += [vars(module).get(name) for module in modules for name in names_in(function.__code__)]
    for value in (*held, *there, vars(function).get("__wrapped__")):
        kind = type(value)  # not what the value itself says: it may be a proxy, or answer to any name
        if kind in (MethodType, staticmethod, classmethod):
            value = value.__func__
        if kind is type or issubclass(kind, type):
            yield from functions_of(value)
        elif type(value) is FunctionType:
            yield value


@cache
def _handles(code: CodeType) -> bool:
    """Whether code has a handler: an ``except``, a ``finally`` or a ``with``, which may swallow what comes."""
    if any(each.opname == "PUSH_EXC_INFO" for each in dis.get_instructions(code)):
        return True
    return any(_handles(constant) for constant in code.co_consts if isinstance(constant, CodeType))
