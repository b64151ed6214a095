"""The large GPT with AdamW as it is by default: operators on lists of tensors, of which several read all its state."""

from __future__ import annotations

import torch

from benchmarks.zoo import large_gpt
from benchmarks.zoo.program import Program

OWN = False


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    return large_gpt.make(size, device, checkpoint, fused=None)
