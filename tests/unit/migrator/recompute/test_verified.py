"""What is made again of a shape for which nobody has tried it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_tiers.migrator.recompute.verified import Took, Verified, are_alike_for_all_shapes, layout


def finds(operators: Sequence[str], held: int, *, others: int = 0) -> bool:
    """Whether operators that held for so many shapes, and others for as many, are found for another shape."""
    base = torch.ones(4, 8)
    *before, last = operators
    name = f"{last}({', '.join(before)})"
    names = [f"{name}#{shape}" for shape in range(held)] + [f"other({name})#{shape}" for shape in range(others)]
    verified = Verified(dict.fromkeys(names, Took(0.0, 0)), layout(base), base._version, frozenset(), None)
    found = SimpleNamespace(names=[f"{name}#new"], operators=tuple(operators))
    replays: Any = SimpleNamespace(find=lambda base: found, joined=lambda found: (found, 0), choices=None)
    return verified.find(base, replays) is not None


def test_what_held_for_three_shapes_is_made_again_for_a_fourth() -> None:
    assert [finds(["add", "gelu"], held) for held in range(5)] == [False, False, False, True, True]


def test_it_is_taken_to_take_as_long_as_the_longest_of_those() -> None:
    held = {f"gelu()#{shape}": Took(float(shape), 0) for shape in range(4)}
    verified = Verified(held, (2, torch.float32), 0, frozenset(), None)
    replay: Any = SimpleNamespace(names=["gelu()#new"], operators=("gelu",))
    assert verified.took(replay, 0, torch.ones(4, 8)) == Took(3.0, 0)


def test_shapes_of_other_operators_do_not_count() -> None:
    assert not finds(["add", "gelu"], 2, others=3)


@pytest.mark.parametrize(
    "operator", ["addmm", "bmm", "convolution", "_scaled_dot_product_flash_attention", "_cudnn_rnn"]
)
def test_what_a_library_chooses_a_kernel_for_is_tried_for_each_shape(operator: str) -> None:
    assert not finds(["add", operator, "gelu"], 9)


@pytest.mark.parametrize(
    "operator", ["mm", "addmm", "bmm", "baddbmm", *(f"_scaled_dot_product_{by}_attention" for by in ("flash", "cudnn"))]
)
def test_products_and_attention_are_trusted_where_the_library_promises_the_same_bits(operator: str) -> None:
    assert are_alike_for_all_shapes(["add", operator, "gelu"], on_gpu=True)
    assert not are_alike_for_all_shapes(["add", operator, "gelu"], on_gpu=False)


@pytest.mark.parametrize("operator", ["convolution", "_scaled_mm", "addmv", "_flash_attention_backward", "_cudnn_rnn"])
def test_for_no_other_operator_of_a_library_is_it_taken_for_granted(operator: str) -> None:
    assert not are_alike_for_all_shapes(["mm", operator], on_gpu=True)


@pytest.mark.parametrize(
    "operator", ["index_add", "index_put", "index_copy", "max_unpool2d", "scatter_add", "cumsum", "mine::scan"]
)
def test_nor_is_what_may_add_in_another_order_the_next_time_trusted(operator: str) -> None:
    assert not finds(["add", operator, "gelu"], 9)


@pytest.mark.parametrize(
    "operator", ["native_layer_norm", "native_dropout", "_to_copy", "cat", "silu", "_softmax", "mul"]
)
def test_others_are(operator: str) -> None:
    assert finds(["add", operator, "gelu"], 3)


def test_a_layout_is_the_same_for_other_sizes_unless_elements_lie_apart() -> None:
    def told(*size: int, view: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
        return layout(view(torch.empty(size)))

    views: dict[str, Callable[[Tensor], Tensor]] = {
        "contiguous": lambda x: x,
        "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
        "transposed": lambda x: x.transpose(0, 3),
    }
    found = {name: told(4, 8, 3, 5, view=view) for name, view in views.items()}
    assert found == {name: told(2, 16, 7, 9, view=view) for name, view in views.items()}
    assert len({*found.values()}) == 3
    parts = lambda x: x[:, ::2]  # noqa: E731
    assert told(4, 8, 3, 5, view=parts) != told(2, 16, 7, 9, view=parts)
    assert told(4, 8, view=lambda x: x.half()) != told(4, 8, view=views["contiguous"])
