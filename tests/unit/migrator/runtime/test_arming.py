"""A thread that trains for the first time is armed as a whole, whatever comes in between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import torch_tiers as tiers


@pytest.mark.parametrize("missed", ["tensors", "recorder"])
def test_an_interrupt_while_extensions_are_built_leaves_the_next_step_to_begin_again(missed: str) -> None:
    """That takes half a minute the first time, in which somebody may press Ctrl-C, and go on."""
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
    with tiers.session(policy="move", hbm="3MiB", dram="64MiB") as session:
        runtime = session.runtime
        plain, asked = getattr(runtime.options, missed), list[str]()

        def interrupted_once() -> Any:
            asked.append(missed)
            if len(asked) == 1:
                raise KeyboardInterrupt
            return plain()

        runtime.options = replace(runtime.options, **{missed: interrupted_once})
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(512, 64))
        assert not runtime.armed
        for _ in range(3):
            model(torch.randn(512, 64)).sum().backward()
        assert runtime.armed and len(asked) == 2
        assert session.stats()["moved"]["h2d"] > 0
