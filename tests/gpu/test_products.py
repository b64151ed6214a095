"""Matrix products repeat their bits on a GPU, whatever the shape, as `recompute/verified.py` relies on (`PRODUCTS`)."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

SHAPES = 60


def _products(a: Tensor, b: Tensor, bias: Tensor) -> list[Tensor]:
    wide = a[None].expand(3, -1, -1).contiguous(), b[None].expand(3, -1, -1).contiguous()
    return [a @ b, torch.addmm(bias, a, b), torch.bmm(*wide), torch.baddbmm(bias, *wide)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_product_has_the_same_bits_in_another_thread_and_on_another_stream(dtype: torch.dtype) -> None:
    chosen, other = random.Random(0), torch.cuda.Stream()
    torch.manual_seed(0)

    def again(*operands: Tensor) -> list[Tensor]:
        with torch.cuda.stream(other):
            other.wait_stream(torch.cuda.default_stream())
            made = _products(*operands)
            other.synchronize()
        return made

    with ThreadPoolExecutor(1) as backward:  # which has a cuBLAS handle of its own, as autograd's thread has
        for _ in range(SHAPES):
            rows, inner, columns = (chosen.choice((1, 7, 64, chosen.randrange(1, 5000))) for _ in range(3))
            sizes = (rows, inner), (inner, columns), (columns,)
            operands = [torch.randn(size, device="cuda", dtype=dtype) for size in sizes]
            first = _products(*operands)
            for repeated in (_products(*operands), backward.submit(again, *operands).result()):
                assert all(map(torch.equal, first, repeated)), f"{rows} x {inner} x {columns}"
