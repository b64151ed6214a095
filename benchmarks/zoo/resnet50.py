"""ResNet-50 on ImageNet's shapes: channels_last, autocast to bf16, SGD with momentum, smoothed labels."""

# mypy: no-warn-return-any
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.program import Program, block, channels_last, seeded


class Bottleneck(nn.Module):
    def __init__(self, inside: int, planes: int, stride: int) -> None:
        super().__init__()
        outside = 4 * planes
        self.conv1, self.bn1 = nn.Conv2d(inside, planes, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv3, self.bn3 = nn.Conv2d(planes, outside, 1, bias=False), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, layers: tuple[int, ...], width: int, classes: int, checkpoint: bool = False) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        self.stages, inside = nn.ModuleList(), width
        for level, count in enumerate(layers):
            planes = width << level
            for k in range(count):
                self.stages.append(Bottleneck(inside, planes, 2 if level and not k else 1))
                inside = 4 * planes
        self.fc = nn.Linear(inside, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = block(self.checkpoint, stage, x)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    device = torch.device(device)
    layers, width, classes, batch, side = (
        ((3, 4, 6, 3), 64, 1000, 512, 224) if size == "full" else ((1, 1, 2, 1), 8, 10, 2, 64)
    )
    generator = seeded(device)
    with device:
        model = channels_last(ResNet(layers, width, classes, checkpoint))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)

    def step() -> Tensor:
        images = torch.randn(batch, 3, side, side, device=device, generator=generator)
        labels = torch.randint(classes, (batch,), device=device, generator=generator)
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(images.to(memory_format=torch.channels_last)), labels, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Program((model,), (optimizer,), step)
