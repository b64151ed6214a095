"""Graph attention of `torch_geometric` in fp32: three layers over one graph of random edges."""

# mypy: no-warn-return-any
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.program import Program, block, package, seeded

NEEDS = ("torch_geometric",)


class Net(nn.Module):
    def __init__(self, inside: int, hidden: int, heads: int, classes: int, checkpoint: bool) -> None:
        super().__init__()
        convolution = package("torch_geometric.nn").GATConv
        self.checkpoint, width = checkpoint, hidden * heads
        self.layers = nn.ModuleList(
            [convolution(inside, hidden, heads), convolution(width, hidden, heads), convolution(width, classes)]
        )

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            x = block(self.checkpoint, layer, F.elu(x) if k else x, edges)
        return x


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    device = torch.device(device)
    nodes, count, inside, hidden, heads, classes = (
        (200_000, 3_000_000, 128, 64, 8, 40) if size == "full" else (200, 1_000, 16, 8, 2, 5)
    )
    generator = seeded(device)
    model = Net(inside, hidden, heads, classes, checkpoint).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    features = torch.randn(nodes, inside, device=device, generator=generator)
    edges = torch.randint(nodes, (2, count), device=device, generator=generator)
    labels = torch.randint(classes, (nodes,), device=device, generator=generator)

    def step() -> Tensor:
        loss = F.cross_entropy(model(features, edges), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Program((model,), (optimizer,), step)
