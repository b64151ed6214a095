"""Modules whose forward catches, calls or holds what a look at it must not trip over."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.scenarios import WHOLE, batch, main, moving, recomputed
from tests.scenarios.parts import STEPS, WIDTH, Part, assert_same_later


@contextlib.contextmanager
def _counting(failed: list[float]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        failed.append(1.0)
        raise


def the_end_of_a_recomputation_is_no_failure_of_the_program_s(device: torch.device) -> None:
    """PyTorch's checkpoint ends it by an exception, which a handler in the forward catches."""

    class Falling(Part):
        def forward(self, x: Tensor) -> Tensor:
            try:
                h = self.last(self.between(self.first(x)))
            except Exception:
                h = self.last(torch.tanh(self.first(x)))
            return x + h

    class Counting(Part):
        def __init__(self) -> None:
            super().__init__()
            self.failed: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            with _counting(self.failed):
                return super().forward(x) / (1 + len(self.failed))

    class Suppressing(Part):
        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(Exception):
                return super().forward(x)
            return x

    for part in (Falling, Counting, Suppressing):
        assert_same_later(part, device, **WHOLE)


class _Answering(dict[str, Any]):
    """A dictionary whose entries are attributes, as many programs have one."""

    __getattr__ = dict.__getitem__


_answers = _Answering(scale=0.5)


def what_a_forward_names_may_answer_to_any_name(device: torch.device) -> None:
    class Asking(Part):
        def between(self, x: Tensor) -> Tensor:
            return F.gelu(x) * _answers.scale

    assert_same_later(Asking, device, **WHOLE)


def what_a_module_holds_is_not_asked_what_it_is(device: torch.device) -> None:
    class Holding(Part):
        def __init__(self) -> None:
            super().__init__()
            gone = Part()
            self.held = [weakref.proxy(gone), _answers, nn.Module.__new__(nn.Module)]
            self.words = {f"word {k}": k for k in range(1000)}

    assert_same_later(Holding, device, **WHOLE)


def what_cannot_be_looked_at_is_left_alone(device: torch.device) -> None:
    class Odd(Part):
        def __init__(self) -> None:
            super().__init__()
            self.functions = np.array([lambda x: x], dtype=object)  # which nobody can pickle

    assert_same_later(Odd, device, **WHOLE)


def a_forward_in_something_else_can_be_copied(device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Part() for _ in range(3))).to(device)
    with moving(**WHOLE) as session:
        for i in range(STEPS):  # until there is a plan, which takes longer where lanes are real
            model(batch(device, i, rows=256, width=WIDTH)).square().mean().backward()
        assert recomputed(session)
        held = copy.deepcopy({"forward": model[1].forward})
        x = batch(device, 9, rows=256, width=WIDTH)
        assert torch.equal(held["forward"](x), model[1](x))
        assert held["forward"].__self__ is not model[1]


if __name__ == "__main__":
    main("odd_modules")
