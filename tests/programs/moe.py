"""A mixture of experts with a top-1 router.

What it saves for backward is not always asked for again: one expert never gets a token and runs on an empty
batch, one output is dropped at once, and another goes to the caller, who leaves it out of the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.programs import Step, batch_generator

WIDTH, EXPERTS, TOKENS = 64, 4, 1024


def expert() -> nn.Sequential:
    """Return one feed-forward expert."""
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class MixtureLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(expert() for _ in range(EXPERTS))
        self.dropped = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU())
        with torch.no_grad():
            self.router.bias[-1] = -1e9  # nothing is ever routed to the last expert

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        self.dropped(y)
        scores = self.router(y)
        weight, choice = scores.softmax(-1).max(-1)
        mixed = torch.zeros_like(y)
        for k, expert in enumerate(self.experts):
            rows = (choice == k).nonzero().squeeze(1)
            mixed = mixed.index_add(0, rows, expert(y[rows]) * weight[rows, None])
        return x + mixed, scores.logsumexp(-1).square().mean()


class Mixture(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MixtureLayer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        penalties = []
        for layer in self.layers:
            x, penalty = layer(x)
            penalties.append(penalty)
        return self.head(x), torch.stack(penalties)


def build(seed: int, device: torch.device) -> tuple[nn.Module, Step]:
    """Build the model and its step."""
    torch.manual_seed(seed)
    model = Mixture().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(i: int) -> Tensor:
        generator = batch_generator(seed, i)
        x = torch.randn(TOKENS, WIDTH, generator=generator).to(device)
        labels = torch.randint(10, (TOKENS,), generator=generator).to(device)
        optimizer.zero_grad(set_to_none=True)
        logits, _unused_penalties = model(x)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step
