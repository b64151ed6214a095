"""GPU memory from the driver itself, past PyTorch's allocator and ours: its pages are never moved or remapped."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from torch_tiers.allocator.errors import TiersError

_OUT_OF_MEMORY = 2


class DeviceMemory:
    """One allocation of GPU memory, which neither the program nor PyTorch counts.

    Attributes
    ----------
    tensor
        All of it, flat uint8. It does not keep the memory alive: it must not be used after `free`.

    Raises
    ------
    MemoryError
        If the GPU has no room.
    TiersError
        If the driver refuses for another reason.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device = device
        address = ctypes.c_uint64()
        with current(device):
            status = _driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes))
        if status == _OUT_OF_MEMORY:
            raise MemoryError(f"{device} has no room for {nbytes} bytes")
        _check(status, f"take {nbytes} bytes of {device}")
        self._address = address.value
        self.tensor = torch.as_tensor(_Interface(self._address, nbytes), device=device)
        if self.tensor.data_ptr() != self._address:
            self.free()
            raise TiersError(f"PyTorch copies memory of {device} instead of wrapping it")

    def free(self) -> None:
        """Free the memory. Nothing may be at work on it."""
        with current(self._device):
            _check(_driver().cuMemFree_v2(ctypes.c_uint64(self._address)), f"free memory of {self._device}")


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Within it, this thread's calls of the driver go to `device`; in a thread new to CUDA they would fail."""
    _check(_driver().cuCtxPushCurrent_v2(_context(_index(device))), f"use {device}")
    try:
        yield
    finally:
        _driver().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _context(index: int) -> ctypes.c_void_p:
    """The context that PyTorch uses, too; kept until the process ends."""
    torch.cuda.init()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _check(_driver().cuDeviceGet(ctypes.byref(device), index), f"find GPU {index}")
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"use GPU {index}")
    return context


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise TiersError(f"cannot {what}: {(text.value or b'unknown error').decode()} (CUDA driver error {status})")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")  # there is one where there is a GPU


class _Interface:
    """Tells PyTorch where the memory is."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
