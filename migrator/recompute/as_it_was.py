"""What a forward finds when backward repeats it: its modules as they were, and the kernels that it was told to use."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from migrator.hooks.compiled import is_wrapper
from migrator.hooks.packed import modified
from migrator.recompute.dropped import FOR_RECOMPUTING
from migrator.recompute.watch import OF_EVERY_MODULE, SETTINGS, keeps_statistics


class Snapshot:
    """What a module and those within were when forward began: parameters, buffers, tensors, modes and other settings.

    Other attributes are not held: a list of tensors would hold the graph of an earlier step. That they are left alone
    until backward is what `migrator.recompute.watch` has seen.

    Parameters
    ----------
    given
        Tensors that forward is given, of which nobody else sees that they are changed.
    """

    def __init__(self, module: nn.Module, given: Iterable[Tensor]) -> None:
        self._modules = [(child, _settings(child)) for child in module.modules() if not is_wrapper(child)]
        tensors: list[Tensor | None] = [*given]
        for child, was in self._modules:
            tensors += was["_parameters"].values()
            if not keeps_statistics(child):  # which changes its own
                tensors += was["_buffers"].values()
        self._versions = [(t, t._version) for t in tensors if t is not None and not t.is_inference()]
        self._wants_grad = [
            (t, t.requires_grad) for _, was in self._modules for t in was["_parameters"].values() if t is not None
        ]
        self._choices = _choices()
        # What drew no number while it was watched may do so later, as a probability that is raised step by step.
        self._numbers = random.getstate(), np.random.get_state(legacy=False)

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
            if keeps_statistics(child):  # which would count the batch a second time
                buffers = {name: None if t is None else t.clone() for name, t in buffers.items()}
            object.__setattr__(child, "__dict__", {**vars(child), **was, "_buffers": dict(buffers)})
        try:
            with _chosen(*self._choices), _drawing(*self._numbers), _wanting(self._wants_grad):
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


_SWITCHES = (
    *(
        (f"_get_{kernel}_sdp_enabled", f"_set_sdp_use_{kernel}")
        for kernel in ("flash", "mem_efficient", "math", "cudnn")
    ),
    *((f"_get_{switch}", f"_set_{switch}") for switch in ("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic")),
    ("_get_float32_matmul_precision", "_set_float32_matmul_precision"),
    ("_get_cudnn_allow_tf32", "_set_cudnn_allow_tf32"),
    ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
)


def _choices() -> tuple[torch.dtype, list[Any]]:
    """Default dtype, and the kernels that may be used: the program may have chosen them for forward only."""
    return torch.get_default_dtype(), [_set_to(get) for get, _ in _SWITCHES]


def _set_to(get: str) -> Any:
    try:
        return getattr(torch._C, get)()
    except RuntimeError:  # of a program that sets precisions in PyTorch's newer way, which has no one answer to this
        return None


def _choose(dtype: torch.dtype, switches: list[Any]) -> None:
    torch.set_default_dtype(dtype)
    for (get, switch), choice in zip(_SWITCHES, switches, strict=True):
        if choice is not None and _set_to(get) != choice:
            getattr(torch._C, switch)(choice)


@contextmanager
def _chosen(dtype: torch.dtype, switches: list[Any]) -> Iterator[None]:
    """Have the choices be these."""
    before = _choices()
    _choose(dtype, switches)
    try:
        yield
    finally:
        _choose(*before)


@contextmanager
def _drawing(python: Any, numpy: Any) -> Iterator[None]:
    """Have random numbers of Python and NumPy go on from these states; those of PyTorch are the checkpoint's."""
    before = random.getstate(), np.random.get_state(legacy=False)
    random.setstate(python)
    np.random.set_state(numpy)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


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
