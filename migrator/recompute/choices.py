"""The kernel choices of a program (TF32, cuDNN, SDPA): a program may set them for its forward only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

_SWITCHES = (
    *(
        (f"_get_{kernel}_sdp_enabled", f"_set_sdp_use_{kernel}")
        for kernel in ("flash", "mem_efficient", "math", "cudnn")
    ),
    *((f"_get_{switch}", f"_set_{switch}") for switch in ("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic")),
    ("_get_float32_matmul_precision", "_set_float32_matmul_precision"),
    ("_get_cudnn_allow_tf32", "_set_cudnn_allow_tf32"),
    ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ("_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
    ("_get_deterministic_fill_uninitialized_memory", "_set_deterministic_fill_uninitialized_memory"),
)

Choices: TypeAlias = tuple[torch.dtype, int, tuple[Any, ...]]


def choices() -> Choices:
    """Return the default dtype, and which kernels may be used."""
    deterministic = torch.get_deterministic_debug_mode()
    return torch.get_default_dtype(), deterministic, tuple([_set_to(get) for get, _ in _SWITCHES])


def _set_to(get: str) -> Any:
    try:
        return getattr(torch._C, get)()
    except RuntimeError:  # of a program that sets precisions in PyTorch's newer way, which has no one answer to this
        return None


def _choose(those: Choices) -> None:
    if choices() == those:  # as in nearly every program
        return
    dtype, deterministic, switches = those
    torch.set_default_dtype(dtype)
    torch.set_deterministic_debug_mode(deterministic)
    for (get, switch), choice in zip(_SWITCHES, switches, strict=True):
        if choice is not None and _set_to(get) != choice:
            getattr(torch._C, switch)(choice)


@contextmanager
def chosen(those: Choices) -> Iterator[None]:
    """Set the choices to those within this scope."""
    before = choices()
    _choose(those)
    try:
        yield
    finally:
        _choose(before)
