"""A one-stage detector on a feature pyramid, whose images have another size in every step; focal loss, boxes by IoU."""

# mypy: no-warn-return-any
from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.program import Program, block, channels_last, seeded
from benchmarks.zoo.resnet50 import ResNet


class Detector(nn.Module):
    def __init__(
        self, layers: tuple[int, ...], width: int, features: int, classes: int, depth: int, checkpoint: bool
    ) -> None:
        super().__init__()
        self.checkpoint, self.backbone = checkpoint, ResNet(layers, width, 1)
        del self.backbone.fc
        self.ends = [sum(layers[: k + 1]) - 1 for k in range(len(layers))]
        inside = [4 * width << k for k in (1, 2, 3)]
        self.lateral = nn.ModuleList(nn.Conv2d(c, features, 1) for c in inside)
        self.smooth = nn.ModuleList(nn.Conv2d(features, features, 3, padding=1) for _ in inside)
        self.kinds, self.boxes = self._tower(features, depth, classes), self._tower(features, depth, 4)
        last = self.kinds[-1]
        assert isinstance(last, nn.Conv2d) and last.bias is not None
        nn.init.constant_(last.bias, -4.6)  # nearly everything is background

    @staticmethod
    def _tower(features: int, depth: int, out: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Conv2d(features, features, 3, padding=1), nn.GroupNorm(8, features), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers, nn.Conv2d(features, out, 3, padding=1))

    def forward(self, images: Tensor) -> list[tuple[Tensor, Tensor]]:
        x, found = self.backbone.stem(images), []
        for k, stage in enumerate(self.backbone.stages):
            x = block(self.checkpoint, stage, x)
            if k in self.ends[1:]:
                found.append(x)
        levels = [lateral(x) for lateral, x in zip(self.lateral, found, strict=True)]
        for k in (1, 0):
            levels[k] = levels[k] + F.interpolate(levels[k + 1], size=levels[k].shape[-2:], mode="nearest")
        levels = [smooth(level) for smooth, level in zip(self.smooth, levels, strict=True)]
        return [(block(self.checkpoint, self.kinds, x), block(self.checkpoint, self.boxes, x)) for x in levels]


def loss_of(levels: list[tuple[Tensor, Tensor]], boxes: Tensor, kinds: Tensor) -> Tensor:
    """Of images with some boxes each, which are corners in pixels: a cell is of the first box that it lies in."""
    scores, distances, cells = [], [], []
    for k, (kind, sides) in enumerate(levels):
        stride, (height, width) = 8 << k, kind.shape[-2:]
        y, x = torch.meshgrid(*(torch.arange(n, device=kind.device) + 0.5 for n in (height, width)), indexing="ij")
        cells.append(torch.stack((x, y), dim=-1).flatten(0, 1) * stride)
        scores.append(kind.flatten(2).transpose(1, 2))
        distances.append(F.softplus(sides.float()).flatten(2).transpose(1, 2) * stride)
    score, distance, cell = torch.cat(scores, 1).float(), torch.cat(distances, 1), torch.cat(cells)
    wanted = torch.cat((cell - boxes[:, :, None, :2], boxes[:, :, None, 2:] - cell), dim=-1)  # image, box, cell, side
    inside = wanted.amin(-1) > 0
    any_box, first = inside.any(1), inside.int().argmax(1)
    target = F.one_hot(kinds.gather(1, first), score.shape[-1]).float() * any_box[..., None]
    error = F.binary_cross_entropy_with_logits(score, target, reduction="none")
    chance = score.sigmoid()
    weight = torch.where(target > 0, 0.25 * (1 - chance) ** 2, 0.75 * chance**2)
    image, at = any_box.nonzero(as_tuple=True)
    ours, theirs = distance[image, at], wanted[image, first[image, at], at]
    shared = (torch.minimum(ours, theirs)[:, :2] + torch.minimum(ours, theirs)[:, 2:]).prod(-1)
    both = (ours[:, :2] + ours[:, 2:]).prod(-1) + (theirs[:, :2] + theirs[:, 2:]).prod(-1) - shared
    return (error * weight).sum() / max(len(at), 1) + (1 - shared / both.clamp(min=1e-6)).sum() / max(len(at), 1)


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    device = torch.device(device)
    layers, width, features, classes, depth, batch, sides = (
        ((3, 4, 6, 3), 64, 256, 80, 4, 24, (640, 704, 768, 832))
        if size == "full"
        else ((1,) * 4, 8, 16, 5, 1, 1, (64, 96))
    )
    generator, order = seeded(device), random.Random(0)
    with device:
        model = channels_last(Detector(layers, width, features, classes, depth, checkpoint))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-4)

    def step() -> Tensor:
        height, across = order.choice(sides), order.choice(sides)
        images = torch.randn(batch, 3, height, across, device=device, generator=generator)
        corners = torch.rand(batch, 8, 2, 2, device=device, generator=generator).sort(2).values
        boxes = (corners * torch.tensor([across, height], device=device)).flatten(2)
        kinds = torch.randint(classes, (batch, 8), device=device, generator=generator)
        with torch.autocast(device.type, torch.bfloat16):
            levels = model(images.to(memory_format=torch.channels_last))
        loss = loss_of(levels, boxes, kinds)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Program((model,), (optimizer,), step)
