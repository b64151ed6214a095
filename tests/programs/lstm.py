"""An LSTM over bytes, whose state is carried from step to step without its graph."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.programs import Step, batch_generator

VOCABULARY, WIDTH, LAYERS, BATCH, LENGTH = 64, 96, 2, 8, 48


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=LAYERS, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x, state = self.lstm(self.tokens(tokens), state)
        return self.head(x), state


def build(seed: int, device: torch.device) -> tuple[nn.Module, Step]:
    """Build the model and its step."""
    torch.manual_seed(seed)
    model = Model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    zeros = torch.zeros(LAYERS, BATCH, WIDTH, device=device)
    state = (zeros, zeros)

    def step(i: int) -> Tensor:
        nonlocal state
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=batch_generator(seed, i)).to(device)
        optimizer.zero_grad(set_to_none=True)
        logits, (hidden, cell) = model(tokens[:, :-1], state)
        state = (hidden.detach(), cell.detach())
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return model, step
