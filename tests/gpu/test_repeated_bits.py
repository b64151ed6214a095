"""Products and attention repeat their bits on a GPU, whatever the shape, as `recompute/verified.py` relies on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attention

SHAPES = 60
Again = Callable[[Callable[[], list[Tensor]]], list[Tensor]]


@pytest.fixture
def again() -> Iterator[Again]:
    """Runs something in another thread, as autograd's is, and on another stream."""
    other = torch.cuda.Stream()

    def there(run: Callable[[], list[Tensor]]) -> list[Tensor]:
        with torch.cuda.stream(other):
            other.wait_stream(torch.cuda.default_stream())
            made = run()
            other.synchronize()
        return made

    with ThreadPoolExecutor(1) as backward:  # which has handles of its own of cuBLAS and cuDNN
        yield lambda run: backward.submit(there, run).result()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_product_has_the_same_bits_in_another_thread_and_on_another_stream(dtype: torch.dtype, again: Again) -> None:
    chosen = random.Random(0)
    torch.manual_seed(0)
    for _ in range(SHAPES):
        rows, inner, columns = (chosen.choice((1, 7, 64, chosen.randrange(1, 5000))) for _ in range(3))
        sizes = (rows, inner), (inner, columns), (columns,)
        a, b, bias = (torch.randn(size, device="cuda", dtype=dtype) for size in sizes)
        wide = a[None].expand(3, -1, -1).contiguous(), b[None].expand(3, -1, -1).contiguous()

        def run(a: Tensor = a, b: Tensor = b, bias: Tensor = bias, wide: tuple[Tensor, Tensor] = wide) -> list[Tensor]:
            return [a @ b, torch.addmm(bias, a, b), torch.bmm(*wide), torch.baddbmm(bias, *wide)]

        first = run()
        for repeated in (run(), again(run)):
            assert all(map(torch.equal, first, repeated)), f"{rows} x {inner} x {columns}"


@pytest.mark.gpu
@pytest.mark.parametrize("by", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_attention_has_the_same_bits_in_another_thread_and_on_another_stream(by: str, again: Again) -> None:
    chosen = random.Random(0)
    torch.manual_seed(0)
    for _ in range(SHAPES):
        batch, heads, width = chosen.choice((1, 2, 8)), chosen.choice((1, 8, 16)), chosen.choice((64, 128))
        queries = chosen.randrange(1, 3000)
        keys = queries if chosen.random() < 0.7 else chosen.randrange(1, 3000)
        sizes = ((batch, heads, length, width) for length in (queries, keys, keys))
        q, k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes)
        causal = queries == keys and chosen.random() < 0.5

        def run(q: Tensor = q, k: Tensor = k, v: Tensor = v, causal: bool = causal) -> list[Tensor]:
            with sdpa_kernel(getattr(SDPBackend, by)):
                return [attention(q, k, v, is_causal=causal)]

        first = run()
        for repeated in (run(), again(run)):
            assert torch.equal(first[0], repeated[0]), f"{queries} x {keys} of {batch} x {heads}, {width} wide"
