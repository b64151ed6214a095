"""The kernel for what follows a convolution, against PyTorch's own kernels: the same bits, in all it takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_tiers.migrator.recompute import fused

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

SHAPES = [(2, 64, 17, 13), (1, 2048, 7, 7), (4, 16, 8, 8), (3, 24, 9, 1), (2, 100, 5, 3, 4), (1, 8, 2048, 2064)]
"""The first three are launched the short way. The last has more rows of channels than the second dimension of a grid
has room for."""
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    layout = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    x = torch.randn(shape, device="cuda", generator=generator).to(dtype)
    return x.to(memory_format=layout) if len(shape) > 1 else x


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize(("add", "clamp"), [(True, True), (True, False), (False, True)])
def test_gives_the_bits_of_the_kernels_that_it_replaces(dtype: torch.dtype, add: bool, clamp: bool) -> None:
    assert fused._exact(torch.device("cuda", 0), dtype, torch.float32, add, clamp)
    generator = torch.Generator("cuda").manual_seed(1)
    for shape in SHAPES:
        x, addend = (_random(shape, dtype, generator) for _ in range(2))
        weight, bias, mean, spread = (_random(shape[1:2], torch.float32, generator) for _ in range(4))
        x[0, 0] = torch.nan
        affine = (weight, bias, mean, spread.abs())
        made = fused._at_once(x, affine, addend if add else None, clamp)
        expected = fused._one_by_one(x, affine, 0.0, addend if add else None, clamp)
        assert made.stride() == expected.stride()
        assert torch.equal(made.isnan(), expected.isnan())
        assert torch.equal(made.nan_to_num().view(BITS[dtype]), expected.nan_to_num().view(BITS[dtype]))


def test_arguments_as_they_mostly_are_are_launched_the_short_way() -> None:
    from torch_tiers.migrator.recompute import fused_kernel

    assert fused._exact(torch.device("cuda", 0), torch.bfloat16, torch.float32, True, True)
    assert fused_kernel._launch.is_short
    assert fused_kernel._launch.compiled


@pytest.mark.parametrize("which", range(6))
@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_pointers_that_are_not_aligned_give_the_same_bits(dtype: torch.dtype, which: int) -> None:
    assert fused._exact(torch.device("cuda", 0), dtype, torch.float32, True, True)
    generator = torch.Generator("cuda").manual_seed(2)
    x, addend = (_random((2, 64, 17, 13), dtype, generator) for _ in range(2))
    weight, bias, mean, spread = (_random((64,), torch.float32, generator) for _ in range(4))
    given = [x, addend, weight, bias, mean, spread.abs()]
    given[which] = _moved_by_one(given[which])
    x, addend, *affine = given
    expected = fused._one_by_one(x, affine, 0.0, addend, True)
    for _ in range(3):
        made = fused._at_once(x, affine, addend, True)
        assert torch.equal(made.view(BITS[dtype]), expected.view(BITS[dtype]))


def _moved_by_one(tensor: Tensor) -> Tensor:
    """The same tensor, one element further in memory than an aligned address."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.size(), tensor.stride(), 1).copy_(tensor)
