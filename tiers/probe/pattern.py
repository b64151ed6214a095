"""Data that can be told from any other, made alike on the CPU and on a GPU."""

from __future__ import annotations

import torch

from torch_tiers.allocator.sizes import MiB

_ODD = 0x1E3779B97F4A7C15  # multiplying by an odd number maps no two words to one
_CHUNK = 16 * MiB  # so that checking a gigabyte does not take another


def fill(memory: torch.Tensor, salt: int) -> None:
    """Write the pattern of `salt` to flat uint8 `memory` of whole words of eight bytes."""
    words = memory.view(torch.int64)
    torch.arange(salt, salt + words.numel(), out=words)
    words.mul_(_ODD)


def matches(memory: torch.Tensor, salt: int) -> bool:
    """Whether `memory` holds the pattern of `salt` and nothing else."""
    words = memory.view(torch.int64)
    for start in range(0, words.numel(), _CHUNK // 8):
        chunk = words[start : start + _CHUNK // 8]
        first = salt + start
        expected = torch.arange(first, first + chunk.numel(), device=memory.device).mul_(_ODD)
        if not torch.equal(chunk, expected):
            return False
    return True
