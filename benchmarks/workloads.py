"""The workloads that every measurement of this project is taken on, in plain PyTorch.

Each function builds one on a device and returns a `Workload`. ``tiny=True`` builds the same structure small
enough for a test on a CPU. Weights and the batch, which is the same in every step, follow from the seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.unet import UNet
from examples.train_gpt import GPT
from examples.train_resnet import ResNet


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, its optimizer and a fixed batch, of which a workload may take a different part in each step.

    Attributes
    ----------
    name
        What reports call it.
    forward
        Runs the forward pass and returns the loss with its graph.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    forward: Callable[[], Tensor]

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


def reference_gpt(device: torch.device | str, *, tiny: bool = False, seed: int = 0) -> Workload:
    """Build the reference GPT: 1.344e9 parameters, batch 8 x 2048, everything bf16 but the loss."""
    return _gpt("reference GPT, tiny" if tiny else "reference GPT", device, seed, TINY if tiny else REFERENCE)


def long_context_gpt(device: torch.device | str, *, tiny: bool = False, seed: int = 0) -> Workload:
    """Build the reference GPT with vocabulary 4,096 and batch 1 x 32,768."""
    if tiny:
        return _gpt("long-context GPT, tiny", device, seed, GPTShape(2, 64, 4, 64, batch=1, length=256))
    return _gpt("long-context GPT", device, seed, GPTShape(24, 2048, 16, 4096, batch=1, length=32_768))


def checkpointed_gpt(device: torch.device | str, *, tiny: bool = False, seed: int = 0) -> Workload:
    """Build the reference GPT with every block checkpointed, without reentrant autograd."""
    workload = reference_gpt(device, tiny=tiny, seed=seed)
    blocks = workload.model.get_submodule("blocks")
    for name, block in list(blocks.named_children()):
        blocks.register_module(name, _Checkpointed(block))
    return replace(workload, name=f"checkpointed {workload.name}")


def changing_gpt(device: torch.device | str, *, tiny: bool = False, seed: int = 0) -> Workload:
    """Build the reference GPT on sequences of five lengths, 512 to 2048, in an order that follows from the seed."""
    name, shape, lengths = "changing GPT", REFERENCE, (512, 896, 1280, 1664, 2048)
    if tiny:
        name, shape, lengths = "changing GPT, tiny", TINY, (8, 14, 20, 26, 32)
    order = random.Random(seed)
    return _gpt(name, device, seed, shape, length=lambda: order.choice(lengths))


def small_gpt(device: torch.device | str, *, seed: int = 0) -> Workload:
    """Build a GPT whose kernels are so short that the host decides its speed: for timing the host's own work."""
    return _gpt("small GPT", device, seed, GPTShape(24, 256, 4, 1024, batch=2, length=256))


def resnet152(device: torch.device | str, *, tiny: bool = False, seed: int = 0) -> Workload:
    """Build ResNet-152: batch 256 x 224 x 224, autocast bf16, channels_last, SGD with momentum."""
    name, layers, width, samples, side = "ResNet-152", (3, 8, 36, 3), 64, 256, 224
    if tiny:
        name, layers, width, samples, side = "ResNet-152, tiny", (1, 2, 3, 1), 8, 2, 64
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

    return Workload(name, model, optimizer, forward)


def unet(device: torch.device | str, *, tiny: bool = False, seed: int = 0) -> Workload:
    """Build a UNet that denoises: batch 16 x 256 x 256, autocast bf16, channels_last, AdamW."""
    name, width, batch, side = ("UNet, tiny", 8, 2, 16) if tiny else ("UNet", 64, 16, 256)
    device = torch.device(device)
    torch.manual_seed(seed)
    with device:
        model = UNet(width).to(memory_format=torch.channels_last)
        noisy, noise = (torch.randn(batch, 3, side, side).to(memory_format=torch.channels_last) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def forward() -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return F.mse_loss(model(noisy).float(), noise)

    return Workload(name, model, optimizer, forward)


@dataclass(frozen=True, slots=True)
class GPTShape:
    """The sizes of a GPT and of its batch."""

    blocks: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    length: int


REFERENCE = GPTShape(24, 2048, 16, 32_000, batch=8, length=2048)
TINY = GPTShape(2, 64, 4, 128, batch=2, length=32)


def _gpt(
    name: str,
    device: torch.device | str,
    seed: int,
    shape: GPTShape,
    *,
    length: Callable[[], int] | None = None,
) -> Workload:
    torch.manual_seed(seed)
    # PlannedIteration in bf16 at once: casting later would leave PyTorch's cache with the holes of twice the weights.
    with torch.device(device), _default_dtype(torch.bfloat16):
        model = GPT(shape.blocks, shape.width, shape.heads, shape.length, shape.vocabulary)
        tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length))
        targets = torch.randint(shape.vocabulary, (shape.batch, shape.length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def forward() -> Tensor:
        now = length() if length else shape.length
        logits = model(tokens[:, :now])
        return F.cross_entropy(logits.float().flatten(0, 1), targets[:, :now].flatten())

    return Workload(name, model, optimizer, forward)


class _Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
