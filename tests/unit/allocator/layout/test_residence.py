"""Weights that may lie in DRAM, on a core without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.unit.one_core import OnOneCore, step
from torch_tiers.allocator.layout.residence import PATIENCE, Residence
from torch_tiers.allocator.native import DRAM, HBM, Core
from torch_tiers.allocator.sizes import MiB

GPU = torch.device("cuda", 0)
NBYTES = 8 * MiB


@pytest.fixture
def weights(pages: OnOneCore, core: Core) -> list[int]:
    return [core.allocate(NBYTES) for _ in range(4)]


@pytest.fixture
def residence(pages: OnOneCore, weights: list[int]) -> Residence:
    pages.more(64 * MiB)
    found = pages.residence(GPU)
    assert found is not None
    found.weights = lambda: dict.fromkeys(weights, NBYTES)
    return found


def test_weights_are_placed_where_they_are_said_to_lie(residence: Residence, core: Core, weights: list[int]) -> None:
    residence.place(weights[:2], weights[2:])
    assert [residence.in_dram(weight) for weight in weights] == [True, True, False, False]
    residence.place(weights[2:3], weights[:1])
    assert [residence.in_dram(weight) for weight in weights] == [False, True, True, False]


def test_weights_in_dram_are_not_taken_for_what_hbm_has_no_room_for(
    pages: OnOneCore, residence: Residence, weights: list[int], core: Core
) -> None:
    residence.place(weights, ())
    core.limit(HBM, core.counts().hbm + 8 * MiB)
    pages.begin()
    for _ in range(2):
        step(core, 4 * MiB)
        pages.period_over()
        assert pages.overflow(GPU) == 0
        assert not pages.spilled(GPU)


def test_weights_are_promoted_where_a_step_leaves_room(
    pages: OnOneCore, residence: Residence, weights: list[int], core: Core
) -> None:
    residence.place(weights, ())
    pages.begin()
    for _ in range(PATIENCE):
        step(core, 4 * MiB)
        pages.period_over()
    assert sum(core.on(weight, HBM) for weight in weights) >= NBYTES


def test_weights_are_demoted_where_a_step_needs_their_room(
    pages: OnOneCore, residence: Residence, weights: list[int], core: Core
) -> None:
    pages.begin()
    for _ in range(PATIENCE):
        step(core, 24 * MiB, 24 * MiB)
        pages.period_over()
    assert sum(core.on(weight, DRAM) for weight in weights) >= NBYTES


def test_a_model_that_does_not_train_settles_at_the_begins_of_its_forwards(
    pages: OnOneCore, residence: Residence, weights: list[int], core: Core
) -> None:
    residence.place(weights, ())
    for _ in range(PATIENCE):
        step(core, 4 * MiB)
        pages.settle(GPU)
    assert sum(core.on(weight, HBM) for weight in weights) >= NBYTES
