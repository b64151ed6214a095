"""Which weights lie in DRAM, and are streamed, where HBM cannot hold all of them. Pure.

The first step shows what else needs room in HBM. Until then a part of the budget is left for it. What it leaves idle is
given to weights afterwards: see `allocator.layout.residence`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_tiers.allocator.layout.demotion import evenly

LEAST = 1 / 8  # of the budget: with less for activations and the like, weights are streamed
OTHERS = 1 / 4  # of the budget: left for those then, until it is known what they take
BUFFER = 1 / 8  # of the budget: where copies of streamed weights lie
LARGEST = 1 / 4  # of the budget: a larger weight stays


def may_be_streamed(weight: int, budget: int, least: int) -> bool:
    """Whether a weight of so many bytes is streamed rather than kept, where one of them has to be."""
    return least <= weight <= budget * LARGEST


def buffer_bytes(weights: Sequence[int], budget: int) -> int:
    """Bytes of HBM for copies of `weights`: at least for two, so that one comes while another is read."""
    return max(int(budget * BUFFER), 2 * max(weights, default=0))


def to_stream(weights: Sequence[int], fixed: int, budget: int) -> list[int]:
    """Which weights to stream, if not all of them can stay in HBM.

    They are spread evenly over the model, so that the computation of those that stay hides the copies of those that do
    not.

    Parameters
    ----------
    weights : sequence of int
        Bytes of the weights that may be streamed, in the order of the model.
    fixed : int
        Bytes of weights that may not, and of gradients.
    budget : int
        HBM budget, in bytes.

    Returns
    -------
    list of int
        Places in `weights`, ascending.
    """
    total = sum(weights)
    if not total or total + fixed <= budget * (1 - LEAST):
        return []
    room = int(budget * (1 - OTHERS)) - fixed - buffer_bytes(weights, budget)
    return evenly(weights, total - max(0, room))
