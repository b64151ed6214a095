"""The UNet of the other benchmarks, on more images: the same noise to be told in every step; checkpointed by level."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.unet import UNet
from benchmarks.zoo.program import Program, block, channels_last, seeded


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    device = torch.device(device)
    width, batch, side = (64, 48, 256) if size == "full" else (8, 2, 16)
    generator = seeded(device)
    with device:
        model = channels_last(UNet(width))
    if checkpoint:
        for level in (*model.down, *model.up):
            level.forward = partial(block, True, level.forward)
    noisy, noise = torch.randn(2, batch, 3, side, side, device=device, generator=generator)
    noisy = noisy.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = F.mse_loss(model(noisy).float(), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Program((model,), (optimizer,), step)
