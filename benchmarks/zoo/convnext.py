"""ConvNeXt: depthwise 7 x 7 convolutions and inverted bottlenecks, autocast to fp16 under a gradient scaler."""

# mypy: no-warn-return-any
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.program import Program, block, channels_last, seeded


class Norm2d(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.gamma * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self, depths: tuple[int, ...], width: int, classes: int, checkpoint: bool) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.stem = nn.Sequential(nn.Conv2d(3, width, 4, 4), Norm2d(width))
        self.layers = nn.ModuleList()
        for level, depth in enumerate(depths):
            if level:
                self.layers.append(nn.Sequential(Norm2d(width), nn.Conv2d(width, 2 * width, 2, 2)))
                width *= 2
            self.layers.extend(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = block(self.checkpoint, layer, x)
        return self.head(self.norm(x.mean((2, 3))))


def make(size: str, device: torch.device | str, checkpoint: bool = False) -> Program:
    device = torch.device(device)
    depths, width, classes, batch, side = (
        ((3, 3, 9, 3), 96, 1000, 416, 224) if size == "full" else ((1, 1, 2), 16, 10, 2, 32)
    )
    generator = seeded(device)
    with device:
        model = channels_last(ConvNeXt(depths, width, classes, checkpoint))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.05)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**12)

    def step() -> Tensor:
        images = torch.randn(batch, 3, side, side, device=device, generator=generator)
        labels = torch.randint(classes, (batch,), device=device, generator=generator)
        with torch.autocast(device.type, torch.float16):
            loss = F.cross_entropy(model(images.to(memory_format=torch.channels_last)), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Program((model,), (optimizer,), step)
