"""The sum of GPU memory that goes straight to a drive. The drive's part of that path has never run on hardware."""

from __future__ import annotations

import pytest
import torch

from torch_tiers.allocator.nvme.checksum import lane_sum, lane_sum_numpy, sum_for
from torch_tiers.allocator.sizes import KiB, MiB


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [4 * KiB, 64 * KiB, 4 * MiB, 4 * MiB + 4 * KiB])
@pytest.mark.parametrize("fill", ["noise", "zeros", "ones"])
def test_gpu_and_cpu_compute_the_same_sum(nbytes: int, fill: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    block = torch.zeros(nbytes, dtype=torch.uint8)
    if fill == "ones":
        block.fill_(255)
    if fill == "noise":
        block.random_(generator=generator)
    on_gpu = block.cuda()
    torch.cuda.synchronize()
    assert sum_for(on_gpu) is lane_sum
    assert lane_sum(on_gpu) == lane_sum(block) == lane_sum_numpy(block.numpy())


@pytest.mark.gpu
def test_a_bit_that_flips_in_gpu_memory_is_found() -> None:
    block = torch.randint(256, (4 * MiB,), dtype=torch.uint8, device="cuda")
    before = lane_sum(block)
    block[1234567] ^= 8
    torch.cuda.synchronize()
    assert lane_sum(block) != before


@pytest.mark.gpu
def test_a_sum_takes_no_memory_that_the_program_may_have_filled() -> None:
    block = torch.randint(256, (4 * MiB,), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    lane_sum(block)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
