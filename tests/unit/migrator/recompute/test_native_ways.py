"""What the native twin of `ways.follow` does by itself; that both do the same is in `test_ways`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.unit.migrator.recompute.test_formulas import BIAS, OPERATIONS, WEIGHT, Packer, X, saved
from tests.unit.migrator.recompute.test_ways import Forward
from tests.unit.natively import built, needs_compiler
from torch_tiers.migrator.recompute import finder, ways
from torch_tiers.migrator.recompute.origins import Origins
from torch_tiers.migrator.recompute.ways import Way

pytestmark = needs_compiler


def _residual(x: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, WEIGHT, BIAS, True) + saved(x))


def found(forward: Forward) -> tuple[Way, Any, Origins]:
    """The way to the formula of what `forward` makes, its node, and where its inputs are."""
    packer = Packer()
    with packer.on():
        made = forward(X.clone().requires_grad_() * 1)
        source = packer.source()
    what = finder.search(made.grad_fn, source, finder.TABLE)
    assert what is not None
    assert what[0].way is not None
    return what[0].way, made.grad_fn, source


@pytest.mark.parametrize("forward", [_residual, OPERATIONS["convolution"]], ids=["residual", "convolution"])
def test_it_asks_nothing_in_python(forward: Forward, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the formulas of convolutional networks, that is: an epsilon it lets Python tell."""
    way, node, source = found(forward)
    for kind in (ways.Setting, ways.Shapes, ways.Saved, ways.Leaf, ways.Passed, ways.Again):
        monkeypatch.delattr(kind, "holds")
    assert built().follow(way, node, source) is not None


def test_it_tells_which_parameters_formulas_take() -> None:
    """Of those alone versions are read when a forward begins."""
    way, node, source = found(lambda x: F.batch_norm(x, None, None, WEIGHT, BIAS, True))
    assert id(BIAS) in source._asked
    source._asked.clear()
    assert built().follow(way, node, source) is not None
    assert source._asked == {id(BIAS)}


def test_a_node_of_another_name_is_refused() -> None:
    way, _, source = found(F.silu)
    assert built().follow(way, F.gelu(X.clone().requires_grad_()).grad_fn, source) is None


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


@pytest.mark.parametrize("name", ["convolution", "relu of batch norm of a convolution"])
def test_nodes_that_are_written_in_python_may_lie_before(name: str) -> None:
    """Their memory is another: what is told of one of PyTorch's own is not to be read there."""
    way, node, source = found(lambda x: OPERATIONS[name](saved(_Own.apply(x))))
    assert built().follow(way, node, source) is not None


def test_an_error_in_python_comes_through() -> None:
    way, node, source = found(F.silu)

    def fails(_: Any) -> Any:
        raise ValueError("read")

    with pytest.raises(ValueError, match="read"):
        built().follow(Way(way.name, (ways.Setting(fails, 0),)), node, source)
