"""Finds master weights: fp32 copies of a model's 16-bit weights, which an optimizer updates in their place.

No forward and no backward reads them, so they may lie in DRAM as the optimizer's state does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from torch_tiers.migrator.program import weights
from torch_tiers.migrator.program.subclasses import own_memory

HALVES = torch.bfloat16, torch.float16


class ModelWeights(NamedTuple):
    """The parameters of all models that have run: the shapes of 16-bit ones, and the identities of all storages."""

    halves: Counter[torch.Size]
    storages: set[int]

    @classmethod
    def among(cls, parameters: Iterable[Tensor]) -> ModelWeights:
        """Look at these."""
        listed = list(parameters)
        return cls(Counter(each.shape for each in listed if each.dtype in HALVES), weights.storages(listed))


def master_weights(optimizer: Optimizer, of_models: ModelWeights) -> list[Tensor]:
    """Return those of the tensors that an optimizer updates.

    Each has the shape of a 16-bit weight, and memory that no model has. Where an optimizer has more of a shape than
    there are such weights, none of that shape counts: a forward may read some.
    """
    if not of_models.halves:  # as in most programs
        return []
    updated = (parameter for group in optimizer.param_groups for parameter in group["params"])
    copies = [
        memory
        for each in updated
        if (memory := own_memory(each)) is not None
        and memory is each
        and memory.dtype is torch.float32
        and memory.untyped_storage()._cdata not in of_models.storages
    ]
    counts = Counter(each.shape for each in copies)
    return [each for each in copies if counts[each.shape] <= of_models.halves[each.shape]]
