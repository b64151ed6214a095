"""Bounce buffers: host memory through which GPU memory is written to a file, or read, where it cannot go directly."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torch_tiers.allocator.host.pinning import PinningRefused, map_pages, pin
from torch_tiers.allocator.sizes import PAGE, round_up

log = logging.getLogger("tiers")

_BUFFERS = 4  # at once: of 8 MiB, which is what a store asks for at a time, four keep a drive and a link busy


class BounceBuffer:
    """Host memory at a multiple of 4 KiB, pinned if it can be, and a stream of its own to copy on.

    Attributes
    ----------
    memory
        Flat uint8.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        pages = map_pages(round_up(nbytes, PAGE))
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            try:
                pin(pages, self._stream.device_index)
            except PinningRefused as error:
                log.info("a bounce buffer is not pinned, and slower: %s", error)
        self.memory = torch.frombuffer(pages, dtype=torch.uint8)

    def serves(self, nbytes: int, device: torch.device) -> bool:
        """Whether it has room for so many bytes, and a stream for blocks of `device`."""
        of_stream = None if self._stream is None else self._stream.device
        return nbytes <= self.memory.numel() and (device == of_stream if device.type == "cuda" else of_stream is None)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy, and wait until that is done. No other work on either tensor is waited for: there must be none."""
        if self._stream is None:
            target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._stream.synchronize()


class Bounce:
    """Lends bounce buffers. Thread-safe; it has none before the first is needed."""

    def __init__(self) -> None:
        self._turns = threading.Semaphore(_BUFFERS)
        self._idle: list[BounceBuffer] = []

    @contextmanager
    def lend(self, block: torch.Tensor) -> Iterator[BounceBuffer]:
        """Wait for a buffer that `block` fits in.

        Raises
        ------
        OSError
            If the system has no memory for one.
        """
        with self._turns:
            try:
                buffer = self._idle.pop()
            except IndexError:
                buffer = None
            if buffer is None or not buffer.serves(block.numel(), block.device):
                buffer = BounceBuffer(block.numel(), block.device)
            try:
                yield buffer
            finally:
                self._idle.append(buffer)
