"""The UNet of the other benchmarks, on the same batch in every step; it is checkpointed level by level."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks import workloads
from benchmarks.zoo.program import Program, block


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    job = workloads.unet(device, tiny=size == "cpu")
    if checkpoint:
        for side in ("down", "up"):
            for level in job.model.get_submodule(side).children():
                level.forward = partial(block, True, level.forward)
    return Program((job.model,), (job.optimizer,), job.step)
