"""Finds master weights: fp32 copies of a model's 16-bit weights, which an optimizer updates in their place.

No forward and no backward reads them, so they may lie in DRAM as the optimizer's state does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from torch_tiers.migrator.program import weights
from torch_tiers.migrator.program.subclasses import PLAIN

HALVES = torch.bfloat16, torch.float16


def master_weights(optimizer: Optimizer, of_models: Iterable[Tensor]) -> list[Tensor]:
    """Return those that an optimizer updates, given the parameters of all models that have run.

    Each has the shape of a 16-bit weight of its own, and memory that no model has. Where there are more of a shape than
    such weights, none of that shape is one: a forward may read some.
    """
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    copies = [each for each in updated if type(each) in PLAIN and each.dtype is torch.float32]
    if not copies:
        return []
    of_models = list(of_models)
    halves = Counter(each.shape for each in of_models if each.dtype in HALVES)
    if not halves:  # as in most programs
        return []
    known = weights.storages(of_models)
    copies = [each for each in copies if not known & weights.storages([each])]
    counts = Counter(each.shape for each in copies)
    return [each for each in copies if counts[each.shape] <= halves[each.shape]]
