"""A UNet as denoisers have it: residual blocks of GroupNorm, SiLU and convolutions, with skip connections."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

MULTIPLES = (1, 2, 4, 8)  # of the width, by level; each has half the side of the one before


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.change = nn.Sequential(
            nn.GroupNorm(8, inside),
            nn.SiLU(),
            nn.Conv2d(inside, outside, 3, padding=1),
            nn.GroupNorm(8, outside),
            nn.SiLU(),
            nn.Conv2d(outside, outside, 3, padding=1),
        )
        self.skip = nn.Identity() if inside == outside else nn.Conv2d(inside, outside, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(x) + self.change(x)


class UNet(nn.Module):
    """From an image to one of its size. The width must be a multiple of 8, the sides of images too."""

    def __init__(self, width: int, channels: int = 3) -> None:
        super().__init__()
        widths = [width * multiple for multiple in MULTIPLES]
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.down = nn.ModuleList(
            nn.Sequential(Residual(before, now), Residual(now, now))
            for before, now in zip([width, *widths], widths, strict=False)
        )
        self.coarser = nn.ModuleList(nn.Conv2d(now, now, 3, stride=2, padding=1) for now in widths[:-1])
        self.finer = nn.ModuleList(
            nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(below, now, 3, padding=1))
            for now, below in pairwise(widths)
        )
        self.up = nn.ModuleList(nn.Sequential(Residual(2 * now, now), Residual(now, now)) for now in widths[:-1])
        self.last = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, channels, 3, padding=1))

    def forward(self, image: Tensor) -> Tensor:
        x = self.first(image)
        skipped = []
        for level, coarser in zip(self.down, self.coarser, strict=False):
            x = level(x)
            skipped.append(x)
            x = coarser(x)
        x = self.down[-1](x)
        for level, finer in zip(reversed(self.up), reversed(self.finer), strict=True):
            x = level(torch.cat((finer(x), skipped.pop()), dim=1))
        return self.last(x)
