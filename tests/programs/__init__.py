"""Small training programs in plain PyTorch, and `run`, which records one so that two runs compare bitwise.

Each module here has ``build(seed, device) -> (model, step)``. ``build`` seeds the global generators, once,
for weights and dropout: whatever else draws from them changes the losses. ``step(i)`` clears the gradients,
trains on a batch that depends on ``seed`` and ``i`` alone, and returns the loss; the gradients stay until the
next step.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn

Step: TypeAlias = Callable[[int], Tensor]

PROGRAMS = (
    "accumulate",
    "amp",
    "checkpointed",
    "cnn_bn",
    "double_backward",
    "lstm",
    "moe",
    "transformer_tied",
    "unet",
)


def batch_generator(seed: int, i: int) -> torch.Generator:
    """Return the CPU generator that the batch of step `i` is drawn from, apart from the global one."""
    return torch.Generator().manual_seed(seed * 1_000_003 + i)


def build(program: str, seed: int, device: str) -> tuple[nn.Module, Step]:
    """Build the program called `program`, one of `PROGRAMS`."""
    model, step = importlib.import_module(f"{__name__}.{program}").build(seed, torch.device(device))
    return model, step


def run(program: str, steps: int, device: str, *, seed: int = 0) -> tuple[list[str], dict[str, list[str]]]:
    """Train for `steps` steps with deterministic kernels.

    Returns
    -------
    tuple
        The loss of every step as ``float.hex``, and for every parameter, by name, the SHA-256 of its gradient
        after every step (``"none"`` where it has no gradient).
    """
    with deterministic_kernels():
        model, step = build(program, seed, device)
        losses: list[str] = []
        gradients: dict[str, list[str]] = {name: [] for name, _ in model.named_parameters()}
        for i in range(steps):
            losses.append(step(i).item().hex())
            for name, parameter in model.named_parameters():
                gradients[name].append(_digest(parameter.grad))
    return losses, gradients


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Ask PyTorch for deterministic kernels, and put back what was set before."""
    # cuBLAS reads this when it is first used: a process on a GPU must come here before its first product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    deterministic, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.benchmark = benchmark


def _digest(gradient: Tensor | None) -> str:
    if gradient is None:
        return "none"
    flat = gradient.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy()).hexdigest()
