"""Log-softmax backward on a GPU: over its gradient, with the bits of one of its own, in a third less memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

from allocator.sizes import MiB
from migrator.runtime import log_softmax

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> Iterator[torch.device]:
    torch.cuda.init()
    yield torch.device("cuda")
    log_softmax.uninstall()


def backward(x: torch.Tensor, targets: torch.Tensor, dim: int = 1) -> tuple[bool, int]:
    """Whether one gradient is where the other was, and the most memory that it took."""
    at = []
    out = F.log_softmax(x, dim)
    out.register_hook(lambda grad: at.append(grad.data_ptr()))
    loss = F.nll_loss(out, targets)
    del out
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss.backward()
    assert x.grad is not None
    return x.grad.data_ptr() == at[0], torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "shape", [(4096, 32_000), (2048, 50_257), (512, 152_064), (4096, 1000), (100_000, 33), (8, 21, 512, 512)]
)
def test_bits_are_the_same(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator(device).manual_seed(1)
    x = (torch.randn(shape, generator=generator, device=device) * 5).to(dtype).requires_grad_()
    targets = torch.randint(shape[1], (*shape[:1], *shape[2:]), generator=generator, device=device)
    over, _ = backward(x, targets)
    assert not over
    plain, x.grad = x.grad, None
    log_softmax.install()
    over, _ = backward(x, targets)
    assert over
    assert torch.equal(x.grad, plain)


def test_input_of_another_type_has_a_gradient_of_its_own(device: torch.device) -> None:
    """PyTorch casts and normalises in one kernel there."""
    log_softmax.install()
    x = torch.randn(2048, 4096, device=device, dtype=torch.float16, requires_grad=True)
    out = F.log_softmax(x, 1, dtype=torch.float32)
    F.nll_loss(out, torch.zeros(2048, dtype=torch.long, device=device)).backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.float16
    assert x.grad.untyped_storage().nbytes() == x.grad.nbytes


def test_takes_one_gradient_less(device: torch.device) -> None:
    x = torch.randn(2048, 32_768, device=device, requires_grad=True)
    targets = torch.randint(32_768, (2048,), device=device)
    log_softmax.install()
    over, peak = backward(x, targets)
    assert over
    assert peak < 257 * MiB  # 256 MiB are one


def test_gradient_that_somebody_has_is_left_alone(device: torch.device) -> None:
    x = torch.randn(2048, 4096, device=device, requires_grad=True)
    targets = torch.randint(4096, (2048,), device=device)
    log_softmax.install()
    out = F.log_softmax(x, 1)
    held: list[torch.Tensor] = []
    out.register_hook(held.append)
    F.nll_loss(out, targets).backward()
    assert held[0].count_nonzero() == 2048
