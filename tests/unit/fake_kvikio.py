"""Stands in for kvikio over `tests/native/cufile_double.c`: what we call of it, as its source does it.

Host memory plays HBM. As in kvikio's `FileHandle::read` and `write`: a file in compatibility mode is read by the system
calls; a count below zero raises; a short one is returned. A file is opened twice, and closed when it is collected.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from torch_tiers.allocator.nvme import cufile, kvikio, libcufile
from torch_tiers.allocator.nvme.libcufile import Descriptor, Status, declare

ROOT = Path(__file__).parents[2]
NAMES = ("read", "write", "handle", "buffer")


class Double:
    """The library, and what a test asks of it."""

    def __init__(self, path: Path) -> None:
        self.library = library = ctypes.CDLL(str(path), use_errno=True)
        for name in ("cuFileBufRegister", "cuFileBufDeregister", "cuFileDriverGetProperties"):
            getattr(library, name).restype = Status
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        library.cuFileBufRegister.argtypes = (pointer, size, ctypes.c_int)
        library.cuFileBufDeregister.argtypes = (pointer,)
        declare(library)
        library.double_first_violation.restype = ctypes.c_char_p
        for count in (library.double_violations, library.double_calls, library.double_left_open):
            count.restype = ctypes.c_long
        library.double_inject.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_long, ctypes.c_long)
        self.reset()

    def reset(self) -> None:
        self.library.double_reset()

    def inject(self, calls: str, fault: str, after: int = 0, every: int = 1) -> None:
        assert calls in NAMES
        self.library.double_inject(calls.encode(), fault.encode(), after, every)

    def calls(self, name: str) -> int:
        return int(self.library.double_calls(NAMES.index(name)))

    @property
    def left_open(self) -> int:
        """Files and memory that are registered."""
        return int(self.library.double_left_open())

    @property
    def violations(self) -> tuple[int, str]:
        return int(self.library.double_violations()), self.library.double_first_violation().decode()


def build(directory: Path) -> Double:
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler")
    library = directory / "cufile_double.so"
    source = ROOT / "tests/native/cufile_double.c"
    flags = ["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run([compiler, *flags, "-o", library, source], check=True)
    return Double(library)


class FakeKvikio:
    """Its modules.

    Attributes
    ----------
    raises
        Whether a count below zero raises, as it does in kvikio, or is returned.
    available
        Whether kvikio, asked to choose, would choose cuFile.
    """

    def __init__(self, double: Double) -> None:
        self.double = double
        self.raises = True
        self.available = True
        self.mode = "AUTO"
        defaults = ModuleType("kvikio.defaults")
        defaults.set = self._set  # type: ignore[attr-defined]
        defaults.is_compat_mode_preferred = self._prefers_compat  # type: ignore[attr-defined]
        driver = ModuleType("kvikio.cufile_driver")
        driver.get = self._get  # type: ignore[attr-defined]
        top = ModuleType("kvikio")
        top.defaults, top.cufile_driver = defaults, driver  # type: ignore[attr-defined]
        top.CompatMode = SimpleNamespace(OFF="OFF", ON="ON", AUTO="AUTO")  # type: ignore[attr-defined]
        top.CuFile = lambda name, flags: CuFile(self, name, flags)  # type: ignore[attr-defined]
        top.memory_register = self._register  # type: ignore[attr-defined]
        top.memory_deregister = self._deregister  # type: ignore[attr-defined]
        self.modules = {"kvikio": top, "kvikio.defaults": defaults, "kvikio.cufile_driver": driver}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, module in self.modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(libcufile, "load", lambda: self.double.library)

    def _prefers_compat(self) -> bool:
        return self.mode == "ON" or (self.mode == "AUTO" and not self.available)

    @contextmanager
    def _setting(self, before: str) -> Any:
        yield
        self.mode = before

    def _set(self, name: str, value: str) -> Any:
        assert name == "compat_mode"
        before, self.mode = self.mode, value
        return self._setting(before)

    def _get(self, name: str) -> bool:
        assert name == "is_gds_available"
        properties = (ctypes.c_char * 256)()
        _checked(self.double.library.cuFileDriverGetProperties(properties))
        return self.available

    def _register(self, block: torch.Tensor) -> None:
        if not self._prefers_compat():
            _checked(self.double.library.cuFileBufRegister(block.data_ptr(), block.numel(), 0))

    def _deregister(self, block: torch.Tensor) -> None:
        if not self._prefers_compat():
            _checked(self.double.library.cuFileBufDeregister(block.data_ptr()))


@contextmanager
def overseen(library: Double, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKvikio]:
    """Have cuFile be the double, as if it was never called before; in the end nothing may be wrong or left."""
    library.reset()
    monkeypatch.setattr(cufile, "_begun", False)
    monkeypatch.setattr(cufile, "_registered", {})
    monkeypatch.setattr(kvikio, "_said", set())
    made = FakeKvikio(library)
    made.install(monkeypatch)
    yield made
    assert library.violations == (0, "")
    assert library.left_open == 0
    assert not cufile._registered


class CuFile:
    def __init__(self, kvikio: FakeKvikio, name: str, flags: str) -> None:
        assert flags == "r+"
        self._kvikio, self._handle = kvikio, ctypes.c_void_p()
        self._cached = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        self._fd = -1
        if kvikio._prefers_compat():
            return
        try:
            self._fd = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:  # a tmpfs: kvikio would give up, and the tests would have no drive
            self._fd = os.dup(self._cached)
        descriptor = Descriptor(1, self._fd, None)
        status = kvikio.double.library.cuFileHandleRegister(ctypes.byref(self._handle), ctypes.byref(descriptor))
        if status.err and kvikio.mode == "AUTO":
            return
        _checked(status)

    def raw_read(self, buf: torch.Tensor, size: int, file_offset: int = 0, dev_offset: int = 0) -> int:
        return self._transfer("cuFileRead", os.preadv, buf, size, file_offset, dev_offset)

    def raw_write(self, buf: torch.Tensor, size: int, file_offset: int = 0, dev_offset: int = 0) -> int:
        return self._transfer("cuFileWrite", os.pwritev, buf, size, file_offset, dev_offset)

    def _transfer(self, name: str, by_system: Any, buf: torch.Tensor, size: int, at: int, start: int) -> int:
        if size > buf.numel():
            raise ValueError("Size is greater than the size of the buffer")
        if not self._handle:
            return int(by_system(self._cached, [buf[start : start + size].numpy().data], at))
        transfer = getattr(self._kvikio.double.library, name)
        count = int(transfer(self._handle, buf.data_ptr(), size, at, start))
        if count < 0 and self._kvikio.raises:
            raise RuntimeError(os.strerror(ctypes.get_errno()) if count == -1 else f"cuFile error: {-count}")
        return count

    def close(self) -> None:
        if self._handle:
            self._kvikio.double.library.cuFileHandleDeregister(self._handle)
            self._handle = ctypes.c_void_p()
        for fd in (self._fd, self._cached):
            if fd >= 0:
                os.close(fd)
        self._fd = self._cached = -1

    def __del__(self) -> None:
        if hasattr(self, "_cached"):
            self.close()


def _checked(status: Any) -> None:
    if status.err:
        raise RuntimeError(f"cuFile error {status.err}")
