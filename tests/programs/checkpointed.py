"""A transformer whose author checkpoints its blocks: the even ones reentrant, the odd ones not."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.programs import Step
from tests.programs.transformer_tied import Transformer, token_batch


class CheckpointedTransformer(Transformer):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for k, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=k % 2 == 0)
        return self.head(self.norm(x))


def build(seed: int, device: torch.device) -> tuple[nn.Module, Step]:
    """Build the model and its step."""
    torch.manual_seed(seed)
    model = CheckpointedTransformer(blocks=4).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(i: int) -> Tensor:
        inputs, targets = token_batch(seed, i, device)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step
