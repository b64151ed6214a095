"""Checksums of what is on disk: one for host memory, and one that a GPU computes, for its memory that goes directly."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from torch_tiers.allocator.nvme.device import DeviceMemory

try:
    import xxhash
except ImportError:
    xxhash = None  # type: ignore[assignment]

Sum = Callable[[torch.Tensor], int]
"""Sums up a flat uint8 tensor, off the GIL."""

SCRATCH = 3
"""Blocks of a GPU's memory, each as large as the largest that is summed up there: keys, and two to work in."""

_FOLDED = 4096  # words that a GPU leaves for the host to add up
_LOW = 2**32 - 1
_ALL = 2**64 - 1
_WEYL = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio


def sum_for(block: torch.Tensor) -> Sum:
    """The checksum function for memory of the kind that `block` lies in."""
    return lane_sum if block.is_cuda else byte_sum


def byte_sum(block: torch.Tensor) -> int:
    """Sum up host memory at its own speed: xxh3, or crc32 where xxhash is not installed."""
    data = block.numpy().data
    return xxhash.xxh3_64_intdigest(data) if xxhash else zlib.crc32(data)


def lane_sum(block: torch.Tensor) -> int:
    """Sum up memory of any device; the same bytes have the same sum on each.

    Every word of 64 bits is a lane, and the sum of all lanes, modulo 2**64, is that of NH (Black et al., UMAC,
    CRYPTO'99) with the word itself added, so that no word is multiplied away::

        low(word + key) * high(word + key) + word

    where both halves are added to the key's halves modulo 2**32, and keys depend on the lane's position. It
    guards against faults, not against an adversary: the keys are known.

    Parameters
    ----------
    block
        Whole words. Nothing may be at work on it; the host waits for the sum.
    """
    words = block.view(torch.int64)  # wraps as unsigned words do
    if block.is_cuda:
        return _adder(block.device)(words)
    keys = torch.from_numpy(_keys(words.numel()).view(np.int64))
    return int(_folded(_lanes(words, keys, torch.empty_like(keys), torch.empty_like(keys))).sum()) & _ALL


def _lanes(words: torch.Tensor, keys: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """What each word adds, in `low`; both of the last two are written over."""
    torch.bitwise_right_shift(words, 32, out=high)
    torch.bitwise_right_shift(keys, 32, out=low)
    high.add_(low).bitwise_and_(_LOW)
    torch.add(words, keys, out=low)
    return low.bitwise_and_(_LOW).mul_(high).add_(words)


def _folded(lanes: torch.Tensor) -> torch.Tensor:
    """Few words with the sum of all `lanes`, which are written over.

    PyTorch's own sum takes memory from its allocator, which the program may have filled.
    """
    while (count := lanes.numel()) > _FOLDED:
        half = (count + 1) // 2
        lanes[: count - half].add_(lanes[half:])
        lanes = lanes[:half]
    return lanes


class _Adder:
    """Sums up memory of one GPU, one block at a time, on a stream and in memory of its own.

    On the default stream it would wait for the program. Of PyTorch's allocator it takes nothing: a thread that reads
    for the program must not fail because the program has filled its GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(device)
        self._held: list[DeviceMemory] = []
        self._memory: tuple[torch.Tensor, ...] = ()
        self._sums = torch.empty(_FOLDED, dtype=torch.int64, pin_memory=True)

    def __call__(self, words: torch.Tensor) -> int:
        count = words.numel()
        with self._lock, torch.cuda.stream(self._stream):
            if not self._memory or self._memory[0].numel() < count:
                self._grow(count)
            keys, low, high = (part[:count] for part in self._memory)
            folded = _folded(_lanes(words, keys, low, high))
            sums = self._sums[: folded.numel()].copy_(folded, non_blocking=True)
            self._stream.synchronize()
            return int(sums.sum()) & _ALL

    def _grow(self, count: int) -> None:
        held: list[DeviceMemory] = []
        try:
            while len(held) < SCRATCH:
                held.append(DeviceMemory(self._device, 8 * count))
            held[0].tensor.view(torch.int64).copy_(torch.from_numpy(_keys(count).view(np.int64)))
        except BaseException:
            for memory in held:
                memory.free()
            raise
        before, self._held = self._held, held
        self._memory = tuple(memory.tensor.view(torch.int64) for memory in held)
        for memory in before:  # nothing is at work on it: each sum is waited for
            memory.free()


@cache
def _adder(device: torch.device) -> _Adder:
    return _Adder(device)


def lane_sum_numpy(data: npt.NDArray[np.uint8]) -> int:
    """Compute `lane_sum` as its formula is written, on unsigned words: what the others are tested against."""
    words = data.view(np.uint64)
    keys = _keys(words.size)
    low = (words + keys) & np.uint64(_LOW)
    high = ((words >> np.uint64(32)) + (keys >> np.uint64(32))) & np.uint64(_LOW)
    return int((low * high + words).sum(dtype=np.uint64))


def _keys(count: int) -> npt.NDArray[np.uint64]:
    """Make the keys of the first lanes: a Weyl sequence through the finaliser of splitmix64 (Steele et al., 2014)."""
    keys = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_WEYL)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))
