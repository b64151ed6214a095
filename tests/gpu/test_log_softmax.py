"""Log-softmax's backward on a GPU: over its gradient, with the bits of one of its own, in a third less memory."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.log_softmax import Overwriting

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


def backward(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The gradient of a loss of these logits."""
    x.grad = None
    F.cross_entropy(x, targets).backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "shape", [(4096, 32_000), (2048, 50_257), (512, 152_064), (4096, 1000), (100_000, 33), (8, 21, 512, 512)]
)
def test_bits_are_the_same(writing_over: Overwriting, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator(DEVICE).manual_seed(1)
    x = (torch.randn(shape, generator=generator, device=DEVICE) * 5).to(dtype).requires_grad_()
    targets = torch.randint(shape[1], (*shape[:1], *shape[2:]), generator=generator, device=DEVICE)
    before = writing_over.count
    made = backward(x, targets)
    assert writing_over.count == before + 1
    writing_over.uninstall()
    assert torch.equal(made, backward(x, targets))
    assert writing_over.count == before + 1


def test_input_of_another_type_has_a_gradient_of_its_own(writing_over: Overwriting) -> None:
    """PyTorch casts and normalises in one kernel there."""
    x = torch.randn(2048, 4096, device=DEVICE, dtype=torch.float16, requires_grad=True)
    before = writing_over.count
    F.nll_loss(F.log_softmax(x, 1, dtype=torch.float32), torch.zeros(2048, dtype=torch.long, device=DEVICE)).backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.float16
    assert writing_over.count == before


def test_takes_one_gradient_less(writing_over: Overwriting) -> None:
    x = torch.randn(2048, 32_768, device=DEVICE, requires_grad=True)
    loss = F.cross_entropy(x, torch.randint(32_768, (2048,), device=DEVICE))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss.backward()
    assert torch.cuda.max_memory_allocated() - before < 257 * MiB  # 256 MiB are one


def test_gradient_that_somebody_has_is_left_alone(writing_over: Overwriting) -> None:
    x = torch.randn(2048, 4096, device=DEVICE, requires_grad=True)
    out = F.log_softmax(x, 1)
    held: list[torch.Tensor] = []
    out.register_hook(held.append)
    before = writing_over.count
    F.nll_loss(out, torch.randint(4096, (2048,), device=DEVICE)).backward()
    assert held[0].count_nonzero() == 2048
    assert writing_over.count == before
