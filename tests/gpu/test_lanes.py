"""The lane out of HBM beside a program that goes on: pieces of any size arrive."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
import torch

from torch_tiers.allocator.sizes import GiB, KiB, MiB, round_up
from torch_tiers.migrator.runtime.devices import open_device
from torch_tiers.migrator.streams import Event
from torch_tiers.migrator.streams.pieces import SLOT, Piece
from torch_tiers.migrator.telemetry.counters import Counters

SIZES = ((1, 600), (SLOT, 64 * KiB), (64 * KiB, MiB), (MiB, 20 * MiB))
GROUPS, UNDER_WAY = 12, 3


def layout(rng: Random) -> list[tuple[int, int]]:
    """Place and size of each piece of a group: most follow one another."""
    kinds = rng.sample(SIZES, rng.randrange(1, 4))
    pieces, end = [], 0
    for _ in range(300 if kinds == [SIZES[0]] else rng.choice((2, 6, 12))):
        nbytes = rng.randint(*rng.choice(kinds))
        pieces.append((end, nbytes))
        end = round_up(end + nbytes, SLOT) + rng.choice((0, 0, 0, SLOT))
    return pieces


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(6))
def test_every_piece_arrives_as_the_program_left_it_and_before_it_is_written_over(seed: int) -> None:
    rng, device = Random(seed), torch.device("cuda", torch.cuda.current_device())
    lanes = open_device(device, Counters(), 0)
    stream = lanes.compute.stream()
    groups = [layout(rng) for _ in range(GROUPS)]
    targets = [torch.empty(sum(pieces[-1]), dtype=torch.uint8, pin_memory=True) for pieces in groups]
    expected: list[list[torch.Tensor]] = []
    under_way: deque[tuple[Event, list[torch.Tensor]]] = deque()
    for pieces, target in zip(groups, targets, strict=True):
        expected.append([torch.randint(256, (nbytes,), dtype=torch.uint8, device=device) for _, nbytes in pieces])
        sources = [torch.zeros_like(bytes_) for bytes_ in expected[-1]]
        torch.cuda._sleep(rng.choice((0, 1_000_000)))  # the lane is asked before they are what they are to be
        torch._foreach_copy_(sources, expected[-1])
        leaving = [
            Piece(target.untyped_storage(), at, source.untyped_storage(), 0, nbytes)
            for (at, nbytes), source in zip(pieces, sources, strict=True)
        ]
        under_way.append((lanes.out.copy(leaving, (), stream), sources))
        if len(under_way) > UNDER_WAY:
            done, left = under_way.popleft()
            lanes.compute.wait(done, "d2h", stream)
            torch._foreach_zero_(left)
    torch.cuda.synchronize()
    for pieces, target, sent in zip(groups, targets, expected, strict=True):
        for (at, nbytes), bytes_ in zip(pieces, sent, strict=True):
            assert torch.equal(target[at : at + nbytes], bytes_.cpu())
    lanes.out.close()


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["to the GPU", "from the GPU"])
def test_a_small_copy_of_the_program_s_own_does_not_wait_for_all_that_a_lane_was_given(direction: str) -> None:
    """Such as a loss that is read, or a batch that comes: the lane's copies are asked for long before they are due."""
    device = torch.device("cuda", torch.cuda.current_device())
    lanes = open_device(device, Counters(), 0)
    lane = lanes.out if direction == "from the GPU" else lanes.back
    host, of_gpu = (
        torch.empty(GiB, dtype=torch.uint8, **where) for where in ({"pin_memory": True}, {"device": device})
    )
    source, target = (of_gpu, host) if lane is lanes.out else (host, of_gpu)
    small, arrived = source[:4096].clone(), target[:4096].clone()
    if lane is lanes.out:
        arrived = arrived.pin_memory()
    else:
        small = small.pin_memory()
    torch.cuda.synchronize()
    for at in range(0, GiB, 64 * MiB):
        done = lane.copy([Piece(target.untyped_storage(), at, source.untyped_storage(), at, 64 * MiB)], ())
    passed_by = 0
    while not done.query() and passed_by < 5:
        arrived.copy_(small, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        passed_by += 1
    torch.cuda.synchronize()
    assert passed_by == 5
    lane.close()
