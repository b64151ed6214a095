"""Mixed precision: autocast to fp16 with a GradScaler on CUDA, autocast to bf16 on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.programs import Step
from tests.programs.transformer_tied import Transformer, token_batch


def build(seed: int, device: torch.device) -> tuple[nn.Module, Step]:
    """Build the model and its step."""
    torch.manual_seed(seed)
    cuda = device.type == "cuda"
    model = Transformer(blocks=2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device.type, enabled=cuda)

    def step(i: int) -> Tensor:
        inputs, targets = token_batch(seed, i, device)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.float16 if cuda else torch.bfloat16):
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return model, step
