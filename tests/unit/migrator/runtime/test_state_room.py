"""How much HBM an optimizer's state may take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn, optim

from torch_tiers.migrator.runtime import state_room
from torch_tiers.migrator.runtime.state_room import COPIES, copies_in, shortages_before_training

CPU = torch.device("cpu")
BUFFER = 10  # bytes, through which state comes from DRAM


def lacking(budget: int, in_use: int, *, in_dram: int = 0, steps: int = 0) -> int:
    """Bytes that HBM will lack for 16 fp32 master weights of a bf16 model, of what it has in use before it trains."""
    model = torch.zeros(16, dtype=torch.bfloat16, requires_grad=True)
    master = model.detach().float()
    optimizer = optim.AdamW([master])
    for _ in range(steps):
        master.grad = torch.ones(16)
        optimizer.step()
    residence = SimpleNamespace(state=in_dram, count_state=lambda: None)
    pages: Any = SimpleNamespace(residence=lambda _: residence, in_use=lambda _: in_use, limit=lambda _: budget)
    with mock.patch.object(state_room, "_buffer_bytes", lambda *_: BUFFER):
        return shortages_before_training(optimizer, [master], [model], pages).get(CPU, 0)


WEIGHTS = 16 * 2 + 16 * 4
GRADIENTS, MOMENTS = 16 * 2, 2 * 16 * 4


@pytest.mark.parametrize("spare", [0, 1, -1])
def test_before_training_hbm_lacks_what_gradients_and_the_state_to_come_exceed_it_by(spare: int) -> None:
    needed = WEIGHTS + GRADIENTS + MOMENTS + BUFFER
    assert lacking(needed + spare, WEIGHTS) == max(0, -spare)


def test_state_that_was_loaded_is_there_and_needs_no_hbm_where_it_lies_in_dram() -> None:
    needed = WEIGHTS + GRADIENTS + BUFFER
    assert lacking(needed, WEIGHTS + MOMENTS, in_dram=MOMENTS, steps=1) == 0
    assert lacking(needed, WEIGHTS + MOMENTS, in_dram=MOMENTS - 8, steps=1) == 8


@pytest.mark.parametrize(
    ("copies", "make"),
    [
        (0, lambda parameters: optim.SGD(parameters, 0.1)),
        (1, lambda parameters: optim.SGD(parameters, 0.1, momentum=0.9)),
        (2, lambda parameters: optim.AdamW(parameters)),
        (3, lambda parameters: optim.AdamW(parameters, amsgrad=True)),
    ],
    ids=["SGD", "with momentum", "AdamW", "AMSGrad"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_loaded_counts_as_it_will_lie_there(copies: int, make: Any, dtype: torch.dtype) -> None:
    """A checkpoint of fp32 weights may be loaded for bf16 ones."""
    saved = [nn.Parameter(torch.ones(100)), nn.Parameter(torch.ones(10, 10))]
    for parameter in saved:
        parameter.grad = torch.ones_like(parameter)
    (before := make(saved)).step()
    optimizer = make([nn.Parameter(parameter.detach().to(dtype)) for parameter in saved])
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1000), requires_grad=False)]})
    before.add_param_group({"params": [nn.Parameter(torch.ones(1000), requires_grad=False)]})
    assert copies_in(before.state_dict(), optimizer) == pytest.approx(copies, abs=0.05)


@pytest.mark.parametrize("given", [None, {}, {"state": {}, "param_groups": []}, {"state": 1, "param_groups": [3]}])
def test_what_no_state_dict_is_counts_as_usual(given: object) -> None:
    assert copies_in(given, optim.AdamW([nn.Parameter(torch.ones(3))])) == COPIES
