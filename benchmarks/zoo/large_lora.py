"""Adapters of a decoder of 6.7e9 frozen weights in bf16, which alone take 12.6 GiB: at 45% they do not fit."""

from __future__ import annotations

import torch

from benchmarks.zoo.lora import SMALL, make_of
from benchmarks.zoo.program import Program

FULL = (32, 4096, 32, 11008, 2048, 32000, 4)


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    return make_of(FULL if size == "full" else SMALL, device, checkpoint)
