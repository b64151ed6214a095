"""Which weights lie in DRAM, and are streamed, where HBM cannot hold all of them. Pure.

The first step shows what else needs room in HBM. Until then all of them lie in DRAM that may. What it leaves idle is
given to weights afterwards: see `allocator.layout.residence`.
"""

from __future__ import annotations

from collections.abc import Sequence

LEAST = 1 / 8  # of the budget: with less for activations and the like, weights are streamed
BUFFER = 1 / 8  # of the budget, or of these weights if they are fewer: where copies of streamed weights lie
LARGEST = 1 / 4  # of the budget: a larger weight stays


def may_be_streamed(weight: int, budget: int, least: int) -> bool:
    """Whether a weight of so many bytes is streamed rather than kept, where one of them has to be."""
    return least <= weight <= budget * LARGEST


def buffer_bytes(weights: Sequence[int], budget: int) -> int:
    """Bytes of HBM for copies of `weights`: at least for two, so that one comes while another is read."""
    return max(int(min(budget, sum(weights)) * BUFFER), 2 * max(weights, default=0))


def fit(weights: int, budget: int) -> bool:
    """Whether weights and their gradients, of so many bytes, leave room in HBM for the rest."""
    return weights <= budget * (1 - LEAST)
