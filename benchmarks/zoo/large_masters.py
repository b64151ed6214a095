"""The large GPT with weights in bf16 and an fp32 copy of them, which AdamW updates: as programs write it themselves."""

# mypy: no-warn-return-any
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.gpt import GPT
from benchmarks.zoo.program import Program, seeded

OWN = False


class Masters:
    """AdamW over an fp32 copy of bf16 weights.

    Attributes
    ----------
    copies : ParameterList
        What is updated.
    adamw : AdamW
        The optimizer of these.
    """

    def __init__(self, weights: Iterable[nn.Parameter], **options: Any) -> None:
        self._weights = list(weights)
        self.copies = nn.ParameterList(weight.detach().float() for weight in self._weights)
        self.adamw = torch.optim.AdamW(self.copies, fused=True, **options)

    def step(self, clip: float | None = None) -> None:
        """Update the copies by the gradients of the weights, which are gone then, and the weights by the copies."""
        for weight, master in zip(self._weights, self.copies, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        if clip is not None:
            nn.utils.clip_grad_norm_(self.copies, clip)
        self.adamw.step()
        with torch.no_grad():
            for weight, master in zip(self._weights, self.copies, strict=True):
                weight.copy_(master)
                master.grad = None


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    device = torch.device(device)
    layers, width, heads, length, vocabulary, batch = (
        (24, 2048, 16, 1024, 32000, 8) if size == "full" else (2, 64, 2, 16, 100, 2)
    )
    generator = seeded(device)
    with device:
        model = GPT(layers, width, heads, length, vocabulary, checkpoint=True).to(torch.bfloat16)
    masters = Masters(model.parameters(), lr=1e-4)

    def step() -> Tensor:
        tokens = torch.randint(vocabulary, (batch, length + 1), device=device, generator=generator)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        masters.step(clip=1.0)
        return loss.detach()

    return Program((model, masters.copies), (masters.adamw,), step)
