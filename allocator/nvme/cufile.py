"""The state of cuFile in this process: whether it may be called, and which memory is registered with it.

After a fork the child must not call cuFile, not even to close or deregister something.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.nvme.device import current

_FORKED = "this process was forked from one that uses cuFile, which does not outlive that"

_lock = threading.Lock()
_setting = threading.Lock()
_registered: dict[int, torch.Tensor] = {}  # by address
_begun = False
_forked = False


def begin() -> None:
    """Note that cuFile is about to be called.

    Raises
    ------
    TiersError
        If it must not be, in the child of a fork.
    """
    global _begun
    if _forked:
        raise TiersError(_FORKED)
    _begun = True


def refusal() -> str | None:
    """Say why cuFile must not be called, or return None."""
    return _FORKED if _forked else None


def register(block: torch.Tensor) -> None:
    """Register memory with cuFile: one whole allocation, of which requests are made later.

    Raises
    ------
    ValueError
        If some of it is registered already.
    TiersError
        In the child of a fork.
    RuntimeError
        If cuFile refuses.
    """
    begin()
    import kvikio

    with _lock:
        if any(_overlap(block, other) for other in _registered.values()):
            raise ValueError(f"memory at {block.data_ptr():#x} is registered already")
        with compat_mode("OFF"), in_context(block):
            kvikio.memory_register(block)
        _registered[block.data_ptr()] = block


def deregister(block: torch.Tensor) -> None:
    """Deregister what `register` was called with, before it is freed. Does nothing in the child of a fork.

    Raises
    ------
    ValueError
        If it is not registered.
    RuntimeError
        If cuFile refuses; it stays registered then, and must not be freed.
    """
    if _forked:
        return
    import kvikio

    with _lock:
        known = _registered.get(block.data_ptr())
        if known is None or known.numel() != block.numel():
            raise ValueError(f"memory at {block.data_ptr():#x} is not registered")
        with compat_mode("OFF"), in_context(block):
            kvikio.memory_deregister(block)
        del _registered[block.data_ptr()]


@contextmanager
def compat_mode(name: Literal["OFF", "ON"]) -> Iterator[None]:
    """Within it, kvikio opens files and registers memory in this compatibility mode, which is global to the process.

    In its mode ``AUTO``, kvikio silently registers nothing where it would not use cuFile.
    """
    import kvikio
    import kvikio.defaults

    with _setting, kvikio.defaults.set("compat_mode", getattr(kvikio.CompatMode, name)):
        yield


def base_of(block: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the registered memory that `block` lies in, and where: cuFile knows memory by its first byte alone.

    It is the block itself where that is not registered.
    """
    for base in list(_registered.values()):
        offset = block.data_ptr() - base.data_ptr()
        if 0 <= offset <= base.numel() - block.numel():
            return base, offset
    return block, 0


@contextmanager
def in_context(block: torch.Tensor) -> Iterator[None]:
    """Within it, this thread's calls go to the GPU of `block`: in a thread new to CUDA, kvikio does not set that."""
    if not block.is_cuda:
        yield
        return
    with current(block.device):
        yield


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    start, end = one.data_ptr(), one.data_ptr() + one.numel()
    return start < other.data_ptr() + other.numel() and other.data_ptr() < end


def _after_fork_in_child() -> None:
    global _lock, _setting, _forked
    _lock, _setting = threading.Lock(), threading.Lock()  # others of the parent may have held the old ones
    _forked = _begun
    _registered.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
