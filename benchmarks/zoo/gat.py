"""Graph attention on one graph, in fp32: gathers and sums over edges written as index_select, scatter and index_add."""

# mypy: no-warn-return-any
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.program import Program, block, seeded


class Layer(nn.Module):
    def __init__(self, inside: int, outside: int, heads: int, dropout: float = 0.3) -> None:
        super().__init__()
        self.heads, self.outside, self.dropout = heads, outside, dropout
        self.project, self.skip = nn.Linear(inside, heads * outside, bias=False), nn.Linear(inside, heads * outside)
        self.source = nn.Parameter(torch.randn(heads, outside) * 0.1)
        self.target = nn.Parameter(torch.randn(heads, outside) * 0.1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h = self.project(x).view(-1, self.heads, self.outside)
        scores = (h * self.source).sum(-1)[source] + (h * self.target).sum(-1)[target]
        scores = F.leaky_relu(scores, 0.2)
        with torch.no_grad():
            index = target[:, None].expand_as(scores)
            most = torch.full_like(h[..., 0], -torch.inf).scatter_reduce(0, index, scores, "amax")
        weights = (scores - most[target]).exp()
        total = torch.zeros_like(h[..., 0]).index_add(0, target, weights)
        weights = F.dropout(weights / total[target], self.dropout, self.training)
        messages = h[source] * weights.unsqueeze(-1)
        return torch.zeros_like(h).index_add(0, target, messages).flatten(1) + self.skip(x)


class GAT(nn.Module):
    def __init__(self, inside: int, hidden: int, heads: int, classes: int, layers: int, checkpoint: bool) -> None:
        super().__init__()
        self.checkpoint, width = checkpoint, hidden * heads
        self.layers = nn.ModuleList(Layer(width if k else inside, hidden, heads) for k in range(layers))
        self.last = Layer(width, classes, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.elu(block(self.checkpoint, layer, x, edges))
        return block(self.checkpoint, self.last, x, edges)


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    device = torch.device(device)
    nodes, count, inside, hidden, heads, classes, layers = (
        (130_000, 2_000_000, 128, 64, 8, 40, 4) if size == "full" else (200, 1_000, 16, 8, 2, 5, 2)
    )
    generator = seeded(device)
    with device:
        model = GAT(inside, hidden, heads, classes, layers, checkpoint)
    features = torch.randn(nodes, inside, device=device, generator=generator)
    labels = features[:, :classes].argmax(1)
    edges = torch.randint(nodes, (2, count), device=device, generator=generator)
    edges = torch.cat((edges, torch.arange(nodes, device=device).expand(2, -1)), dim=1)  # everyone hears itself
    known = torch.rand(nodes, device=device, generator=generator) < 0.5
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(features, edges)[known], labels[known])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Program((model,), (optimizer,), step)
