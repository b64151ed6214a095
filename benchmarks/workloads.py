"""The workloads that every measurement of this project is taken on, in plain PyTorch.

Each function builds one on a device and returns a `Workload`. ``tiny=True`` builds the same structure small
enough for a test on a CPU. Weights and the batch, which is the same in every step, follow from the seed. `batch`
takes the place of the workload's own number of samples in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.train_gpt import GPT
from examples.train_resnet import ResNet


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, its optimizer and a fixed batch.

    Attributes
    ----------
    name
        What reports call it.
    forward
        Runs the forward pass and returns the loss with its graph.
    batch
        Samples in a step.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    forward: Callable[[], Tensor]
    batch: int

    def forward_backward(self) -> Tensor:
        """Run forward and backward, add to the gradients, and return the loss without its graph."""
        loss = self.forward()
        loss.backward()
        return loss.detach()

    def step(self) -> Tensor:
        """Run one full training step, which leaves no gradients, and return the loss without its graph."""
        loss = self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss


def reference_gpt(
    device: torch.device | str, *, tiny: bool = False, seed: int = 0, batch: int | None = None
) -> Workload:
    """Build the reference GPT: 1.344e9 parameters, batch 8 x 2048, everything bf16 but the loss."""
    if tiny:
        return _gpt("reference GPT, tiny", device, seed, GPTShape(2, 64, 4, 128, batch=batch or 2, length=32))
    return _gpt("reference GPT", device, seed, GPTShape(24, 2048, 16, 32_000, batch=batch or 8, length=2048))


def long_context_gpt(
    device: torch.device | str, *, tiny: bool = False, seed: int = 0, batch: int | None = None
) -> Workload:
    """Build the reference GPT with vocabulary 4,096 and batch 1 x 32,768."""
    if tiny:
        return _gpt("long-context GPT, tiny", device, seed, GPTShape(2, 64, 4, 64, batch=batch or 1, length=256))
    return _gpt("long-context GPT", device, seed, GPTShape(24, 2048, 16, 4096, batch=batch or 1, length=32_768))


def small_gpt(device: torch.device | str, *, seed: int = 0) -> Workload:
    """Build a GPT whose kernels are so short that the host decides its speed: for timing the host's own work."""
    return _gpt("small GPT", device, seed, GPTShape(24, 256, 4, 1024, batch=2, length=256))


def resnet152(device: torch.device | str, *, tiny: bool = False, seed: int = 0, batch: int | None = None) -> Workload:
    """Build ResNet-152: batch 256 x 224 x 224, autocast bf16, channels_last, SGD with momentum."""
    name, layers, width, samples, side = "ResNet-152", (3, 8, 36, 3), 64, 256, 224
    if tiny:
        name, layers, width, samples, side = "ResNet-152, tiny", (1, 2, 3, 1), 8, 2, 64
    samples = batch or samples
    device = torch.device(device)
    torch.manual_seed(seed)
    with device:
        model = ResNet(layers, classes=1000, width=width).to(memory_format=torch.channels_last)
        images = torch.randn(samples, 3, side, side).to(memory_format=torch.channels_last)
        labels = torch.randint(1000, (samples,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, fused=True)

    def forward() -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return F.cross_entropy(model(images), labels)

    return Workload(name, model, optimizer, forward, samples)


@dataclass(frozen=True, slots=True)
class GPTShape:
    """The sizes of a GPT and of its batch."""

    blocks: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    length: int


def _gpt(name: str, device: torch.device | str, seed: int, shape: GPTShape) -> Workload:
    torch.manual_seed(seed)
    # Made in bf16 at once: casting later would leave PyTorch's cache with the holes of twice the weights.
    with torch.device(device), _default_dtype(torch.bfloat16):
        model = GPT(shape.blocks, shape.width, shape.heads, shape.length, shape.vocabulary)
        tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length))
        targets = torch.randint(shape.vocabulary, (shape.batch, shape.length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def forward() -> Tensor:
        return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())

    return Workload(name, model, optimizer, forward, shape.batch)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
