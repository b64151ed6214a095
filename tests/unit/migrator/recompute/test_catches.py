"""Which forwards may catch what ends a checkpoint's recomputation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from torch_tiers.migrator.recompute.catches import catches


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():  # its forward has nothing to do with that
            self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.relu(self.layer(x)))

    def again(self, x: Tensor) -> Tensor:
        return x


class ByItself(Plain):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x)
        except RuntimeError:
            return x


class ByAMethod(Plain):
    def again(self, x: Tensor) -> Tensor:
        try:
            return x
        finally:
            del x


class Within(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Plain(), ByItself())


class ByWith(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError):
            x = super().forward(x)
        return x


@contextlib.contextmanager
def counted() -> Iterator[None]:
    try:
        yield
    except RuntimeError:
        raise


def looked_at(x: Tensor) -> Tensor:
    context = counted()
    return x if context else -x


class ByAFunction(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return looked_at(x)


@pytest.mark.parametrize(
    ("module", "may"),
    [(Plain, False), (ByItself, True), (ByAMethod, True), (Within, True), (ByWith, True), (ByAFunction, True)],
)
def test_what_may_catch_is_known(module: type[nn.Module], may: bool) -> None:
    assert catches(module()) == may


def test_what_is_named_need_not_be_what_it_seems(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answering(dict):  # type: ignore[type-arg]
        __getattr__ = dict.__getitem__

    for odd in (Answering(), SimpleNamespace(), 3, len, iter(())):
        monkeypatch.setitem(globals(), "looked_at", odd)
        assert not catches(ByAFunction())
