"""Which modules backward may run again: those whose forward is PyTorch's own, and reads only tensors and settings.

Any other forward is Python that may read state from anywhere, changed since. To look for such changes can never be
complete, and a difference that is found afterwards cannot be mended: where a `forward` says ``x * config.scale``,
nobody tells us that the program sets another scale before backward. PyTorch's own functions, too, a program may
replace: they must be those that were there when this was imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter, itemgetter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd

from torch_tiers.migrator.recompute.watch import OF_EVERY_MODULE, SETTINGS, is_torch, names_in

_MAY_DRAW = (_DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d, nn.MultiheadAttention, nn.RNNBase)
"""Classes that may draw random numbers. Of these, RReLU saves its noise before that is filled, too."""

_CALLS_OTHERS = (nn.TripletMarginWithDistanceLoss, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Classes that may be given a function of the program's."""

_TENSORS = (Tensor, nn.Parameter)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_IN_A_CALL = ("__getattr__", "__getattribute__", "_call_impl", "_slow_forward", "_wrapped_call_impl")
"""Methods of every module that its forward depends on. Of the others Dynamo replaces some by itself."""

_ASIDE = frozenset(("__init__", "__setstate__", "__repr__", "extra_repr", "reset_parameters", "__call__"))
"""Methods of classes that no forward calls; calls are looked at by themselves."""

IN_PLACE = "_compiled_call_impl"
"""Where PyTorch looks for what `Module.compile` made."""

CALL = nn.Module.__call__
our_call: Callable[..., Any] | None = None
"""What stands in the place of `CALL` for a session and calls that; None if something else did before."""


def _kinds() -> dict[type, Callable[[type], Any]]:
    """Classes of `torch.nn`, each with what gets its methods."""
    kinds = {
        kind
        for kind in vars(nn).values()
        if isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__.startswith("torch.nn.")
    }
    return {kind: attrgetter(*_methods(kind)) for kind in kinds if not issubclass(kind, (*_MAY_DRAW, *_CALLS_OTHERS))}


def _methods(kind: type) -> list[str]:
    bases = [base for base in kind.__mro__ if base not in (object, nn.Module)]
    names = {name for base in bases for name, value in vars(base).items() if callable(value)}
    return sorted((names - _ASIDE).union(_IN_A_CALL))


_METHODS_OF = _kinds()
_METHODS = {kind: get(kind) for kind, get in _METHODS_OF.items()}


def _called() -> list[tuple[Mapping[str, Any], Callable[[Any], Any]]]:
    """Where functions lie that these methods call, each with what gets them."""
    of_functional = {name: value for name, value in vars(functional).items() if callable(value)}
    functions = [f for f in [*of_functional.values(), *(m for of in _METHODS.values() for m in of)]]
    codes = [f.__code__ for f in functions if isinstance(f, FunctionType)]
    of_torch = {name for code in codes for name in names_in(code) if callable(vars(torch).get(name))}
    return [(vars(functional), itemgetter(*of_functional)), (vars(torch), itemgetter(*of_torch))]


_CALLED = [(there, get, get(there)) for there, get in _called()]


def _is_torchs(function: Any) -> bool:
    # Its globals tell whose it is, where `functools.wraps` copies the name of the module.
    return not isinstance(function, FunctionType) or is_torch(function.__globals__.get("__name__", ""))


_WERE_REPLACED = not all(map(_is_torchs, [f for _, _, those in _CALLED for f in those]))
_FOREIGN = {kind for kind, methods in _METHODS.items() if not all(map(_is_torchs, methods))}
"""Before this was imported."""


def is_exact(module: nn.Module, tensors: Iterable[Tensor] = (), but: str = IN_PLACE) -> bool:
    """Whether backward finds what forward did, if it runs a module again that is given tensors.

    The module and all within must be exactly of classes of `torch.nn`, without hooks, randomness and buffers.

    Parameters
    ----------
    but
        The attribute of `module` by which it is run, whatever that is.
    """
    children = list(module.modules())
    return (
        stands(map(type, children))
        and all(_is_exact_itself(child, but if child is module else "") for child in children)
        and all(type(tensor) in _TENSORS for tensor in tensors)
    )


def may_draw() -> bool:
    """Whether what is recomputed may draw random numbers: no exact module does. Tests have others recomputed, too."""
    return False


def stands(kinds: Iterable[type]) -> bool:
    """Whether the functions and methods by which modules of these classes run are still PyTorch's own."""
    known = [kind for kind in set(kinds) if kind in _METHODS]
    try:
        return (
            not _WERE_REPLACED
            and all(get(there) == were for there, get, were in _CALLED)
            and all(_METHODS_OF[kind](kind) == _METHODS[kind] for kind in known)
            and all(kind.__call__ in (CALL, our_call) for kind in known)
        )
    except (AttributeError, KeyError):  # one is gone
        return False


def _is_exact_itself(module: nn.Module, but: str) -> bool:
    kind, own = type(module), vars(module)
    return (
        kind in _METHODS
        and kind not in _FOREIGN
        and not any(own[name] for name in _HOOKS)
        and all(buffer is None for buffer in own["_buffers"].values())
        and all(parameter is None or type(parameter) in _TENSORS for parameter in own["_parameters"].values())
        and all(name == but or _is_setting(own[name]) for name in own.keys() - OF_EVERY_MODULE)
    )


def _is_setting(value: Any) -> bool:
    """Whether a value is a number or a name, some of these, or a plain tensor, which cannot be a function's."""
    kind = type(value)
    return (
        kind in SETTINGS
        or kind in _TENSORS
        or (kind in (tuple, list, torch.Size) and SETTINGS.issuperset(map(type, value)))
    )
