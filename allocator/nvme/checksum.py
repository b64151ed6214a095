"""The checksum of what is on disk: xxh3 at memory speed, or crc32 where xxhash is not installed."""

from __future__ import annotations

import zlib

import torch

try:
    import xxhash
except ImportError:
    xxhash = None  # type: ignore[assignment]


def checksum(block: torch.Tensor) -> int:
    """Sum up a flat uint8 CPU tensor, off the GIL."""
    data = block.numpy().data
    return xxhash.xxh3_64_intdigest(data) if xxhash else zlib.crc32(data)
