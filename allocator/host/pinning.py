"""Maps host pages, makes them resident, and pins them, through the C library and the CUDA runtime."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.sizes import PAGE, format_size

log = logging.getLogger("tiers")

Pages = ctypes.Array[ctypes.c_ubyte]
"""Mapped memory. Whoever holds it, or a tensor made from it, keeps it mapped (and pinned)."""

_SMALL_PAGE = mmap.PAGESIZE
_TOUCHED_AT_ONCE = 128 * PAGE
_TOUCHING_THREADS = 4
_MBIND = {"x86_64": 237, "aarch64": 235}  # system calls; libnuma, which wraps them, need not be installed
_MPOL_PREFERRED = 1
_M_MMAP_THRESHOLD = -3
_LARGE = 1 << 20
_PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegisterPortable (pinned for every GPU) | cudaHostRegisterMapped

_RELAXED = 2  # cudaStreamCaptureModeRelaxed


_mapped: weakref.WeakValueDictionary[int, Pages] = weakref.WeakValueDictionary()  # by address
_inherited: list[Pages] = []
os.register_at_fork(after_in_child=lambda: _inherited.extend(_mapped.values()))


class PinningRefused(TiersError):
    """The driver refused to pin host memory; the text is its reason."""


def map_pages(nbytes: int, node: int | None = None) -> Pages:
    """Map `nbytes` of private zeroed memory, its address a multiple of `PAGE`; nothing is resident yet.

    The system takes the memory back when the last reference to the result is gone. A forked child does not
    have the memory. It keeps its reference to the result: without it, what lies at these addresses would be unmapped.

    Parameters
    ----------
    node
        The NUMA node whose memory is taken while it has any; None leaves it to the kernel.

    Raises
    ------
    OSError
        If the system refuses: out of address space or memory, or a limit.
    """
    region = mmap.mmap(-1, nbytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # After a fork the parent's next write would move a page away from under a DMA that is on its way to it.
    region.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # a kernel built without huge pages: pinning is slower, nothing else changes
        region.madvise(mmap.MADV_HUGEPAGE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(region))
    pages = (ctypes.c_ubyte * nbytes).from_buffer(region, -base % PAGE)
    _mapped[base] = pages
    if node is not None:
        _prefer(pages, node)
    return pages


def _prefer(pages: Pages, node: int) -> None:
    """Have `pages` that are not resident yet taken from `node`; said where the system does not let us."""
    call = _MBIND.get(platform.machine())
    if call is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    mask = ctypes.c_ulong(1 << node)
    address, nbytes = ctypes.c_void_p(ctypes.addressof(pages)), ctypes.c_ulong(ctypes.sizeof(pages))
    bits = ctypes.c_ulong(8 * ctypes.sizeof(mask))
    if libc.syscall(call, address, nbytes, _MPOL_PREFERRED, ctypes.byref(mask), bits, 0):
        log.info("dram is placed by the kernel, not on NUMA node %d: %s", node, os.strerror(ctypes.get_errno()))


def return_what_is_freed() -> None:
    """Have the C library give large blocks back to the system when they are freed, instead of keeping them.

    PyTorch's allocator for the CPU asks it for aligned blocks, and those it keeps it often cannot use again, so
    what leaves memory would not make any room. Costs page faults; a C library without the setting is left alone.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE)


def touch(pages: Pages) -> None:
    """Make fresh `pages` resident, in parallel if threads can be had, and off the GIL. What they held is lost."""
    memory = np.ctypeslib.as_array(pages)
    chunks = [memory[at : at + _TOUCHED_AT_ONCE] for at in range(0, memory.size, _TOUCHED_AT_ONCE)]

    def touch_chunk(chunk: npt.NDArray[np.uint8]) -> None:
        chunk[::_SMALL_PAGE] = 0

    try:
        with ThreadPoolExecutor(_TOUCHING_THREADS, thread_name_prefix="tiers-touch") as pool:
            for _ in pool.map(touch_chunk, chunks):
                pass
    except RuntimeError:  # no thread can be started (ulimit -u, the cgroup's pids.max): slower, nothing else changes
        for chunk in chunks:
            touch_chunk(chunk)


def pin(pages: Pages, device: int) -> None:
    """Pin `pages` and map them into every GPU's address space; unmapping them unpins them first.

    Takes 0.4 s a GiB, a quarter of that if they are resident already.

    Parameters
    ----------
    device
        The GPU whose context does the work. Without it a fresh thread would create a context on GPU 0.

    Raises
    ------
    PinningRefused
        With the driver's reason.
    """
    address, nbytes = ctypes.addressof(pages), ctypes.sizeof(pages)

    def register() -> str | None:
        with torch.cuda.device(device), _beside_captures():
            cudart = torch.cuda.cudart()
            status = cudart.cudaHostRegister(address, nbytes, _PORTABLE_AND_MAPPED)
            return None if status == cudart.cudaError.success else str(cudart.cudaGetErrorString(status))

    # The CUDA runtime remembers a failed call until its thread asks, and PyTorch asks after the next kernel
    # launch and would blame that kernel. What a thread of its own remembers ends with it.
    with ThreadPoolExecutor(1, thread_name_prefix="tiers-pin") as own_thread:
        try:
            under_way = own_thread.submit(register)
        except RuntimeError:  # no thread can be started
            refusal = register()
            _forget_error()
        else:
            refusal = under_way.result()
    if refusal is not None:
        raise PinningRefused(f"cannot pin {format_size(nbytes)} of host memory: {refusal}")
    weakref.finalize(pages, _unpin, address, device, os.getpid())  # also runs at exit, while the driver is still up


def _forget_error() -> None:
    """Have the CUDA runtime forget the failed call of this thread; where its library is not found, it remembers."""
    with suppress(AttributeError):
        ctypes.CDLL(None).cudaGetLastError()


def _unpin(address: int, device: int, pid: int) -> None:
    if os.getpid() != pid:  # a forked child has neither the pages nor a CUDA context
        return
    # A thread that has none yet, such as the keeper's, would make a context on GPU 0.
    with torch.cuda.device(device), _beside_captures():
        cudart = torch.cuda.cudart()
        status = cudart.cudaHostUnregister(address)
    if status != cudart.cudaError.success:
        log.warning("cannot unpin host memory at %#x: %s", address, cudart.cudaGetErrorString(status))


@contextmanager
def _beside_captures() -> Iterator[None]:
    """What this thread does inside is no part of a graph that another captures; else CUDA would give that up."""
    driver, mode = _driver(), ctypes.c_int(_RELAXED)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")  # there is one where anything is pinned
