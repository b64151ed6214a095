"""Reads and writes of cuFile itself.

kvikio's calls wait for the GPU's default stream, on which programs train: each request would wait for all that is
queued there. kvikio finds and starts the library, and registers memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import c_int, c_int64, c_size_t, c_ssize_t, c_void_p
from functools import cache

import torch

_OPAQUE_FD = 1
"""`CU_FILE_HANDLE_TYPE_OPAQUE_FD`."""


class Status(ctypes.Structure):
    """`CUfileError_t`."""

    _fields_ = (("err", c_int), ("cu_err", c_int))


class Descriptor(ctypes.Structure):
    """`CUfileDescr_t`: its union is as long as a pointer."""

    _fields_ = (("type", c_int), ("fd", c_void_p), ("operations", c_void_p))


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Tell ctypes the types of what is called."""
    library.cuFileHandleRegister.argtypes = (ctypes.POINTER(c_void_p), ctypes.POINTER(Descriptor))
    library.cuFileHandleRegister.restype = Status
    library.cuFileHandleDeregister.argtypes = (c_void_p,)
    library.cuFileHandleDeregister.restype = None
    for transfer in (library.cuFileRead, library.cuFileWrite):
        transfer.argtypes = (c_void_p, c_void_p, c_size_t, c_int64, c_int64)
        transfer.restype = c_ssize_t
    return library


@cache
def load() -> ctypes.CDLL:
    """The library that kvikio has loaded.

    Raises
    ------
    OSError
        If there is none.
    """
    import kvikio  # noqa: F401

    return declare(ctypes.CDLL("libcufile.so.0", use_errno=True))


class Handle:
    """An open file that cuFile knows.

    Parameters
    ----------
    name
        Its path, by which cuFile opens it once more: a file needs a name for as long as that takes.

    Raises
    ------
    RuntimeError
        If cuFile does not take the file.
    OSError
        If there is no cuFile, or the file's system has no O_DIRECT.
    """

    def __init__(self, name: str) -> None:
        self._library = load()
        self._handle = c_void_p()
        self._fd = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        descriptor = Descriptor(_OPAQUE_FD, self._fd, None)
        status = self._library.cuFileHandleRegister(ctypes.byref(self._handle), ctypes.byref(descriptor))
        if status.err:
            os.close(self._fd)
            raise RuntimeError(f"cuFile does not take the file (error {status.err})")

    def raw_read(self, base: torch.Tensor, size: int, offset: int, start: int) -> int:
        """Read `size` bytes at `offset` of the file to byte `start` of registered memory; the bytes read.

        Raises
        ------
        RuntimeError
            If cuFile fails.
        """
        return self._transfer(self._library.cuFileRead, base, size, offset, start)

    def raw_write(self, base: torch.Tensor, size: int, offset: int, start: int) -> int:
        """Write them, likewise."""
        return self._transfer(self._library.cuFileWrite, base, size, offset, start)

    def close(self) -> None:
        """Have cuFile forget the file. Idempotent."""
        handle, self._handle = self._handle, c_void_p()
        if handle:
            self._library.cuFileHandleDeregister(handle)
            os.close(self._fd)

    def _transfer(self, call: Callable[..., int], base: torch.Tensor, size: int, offset: int, start: int) -> int:
        count = int(call(self._handle, base.data_ptr(), size, offset, start))
        if count < 0:
            raise RuntimeError(os.strerror(ctypes.get_errno()) if count == -1 else f"cuFile error {-count}")
        return count
