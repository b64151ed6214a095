"""Every operation of the table, recomputed bit for bit from what is packed for backward anyway."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_tiers.migrator.recompute import fused, fused_layer_norm, operations
from torch_tiers.migrator.recompute.dropped import run
from torch_tiers.migrator.recompute.finder import base_of, find
from torch_tiers.migrator.recompute.formulas import given_at_last
from torch_tiers.migrator.recompute.origins import Origins, note, note_epsilon

X = torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(0))
WEIGHT, BIAS = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))
MATRIX = nn.Parameter(torch.rand(8, 6))
KERNEL = nn.Parameter(torch.rand(8, 8, 3, 3))


class Packer:
    """Packs as the hooks do, and notes where tensors came from."""

    def __init__(self) -> None:
        self.packed: list[tuple[Tensor, Any]] = []

    def pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        packed = (tensor.detach(), tensor._version)
        note(tensor, packed, "")
        return packed

    def unpack(self, packed: tuple[Tensor, int]) -> Tensor:
        return packed[0]

    def source(self, epsilon: float | None = None) -> Origins:
        versions = {id(p): (weakref.ref(p), p._version) for p in (WEIGHT, BIAS)}
        return Origins(self.unpack, self.pack, versions, set(), set(), 0, epsilon)

    @contextmanager
    def on(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            yield

    def again(self, tensor: Tensor, epsilon: float | None = None) -> Tensor | None:
        formula = find(base_of(tensor), self.source(epsilon))
        return None if formula is None else run(formula, self.unpack)


def assert_bitwise(one: Tensor | None, other: Tensor) -> None:
    assert one is not None
    assert (one.size(), one.stride(), one.dtype) == (other.size(), other.stride(), other.dtype)
    flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    assert torch.equal(*flat)


graphs: list[Tensor] = []


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    yield
    graphs.clear()


def saved(x: Tensor) -> Tensor:
    """The tensor itself, saved by an operation that is part of a graph."""
    graphs.append(x.square())
    return x


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": lambda x: F.relu(saved(x)),
    "relu in place on batch norm": lambda x: F.relu_(F.batch_norm(x, None, None, WEIGHT, BIAS, True)),
    "batch norm": lambda x: F.batch_norm(x, torch.zeros(8), torch.ones(8), WEIGHT, BIAS, True),
    "group norm": lambda x: F.group_norm(x, 2, WEIGHT, BIAS),
    "rms norm": lambda x: F.rms_norm(x, (6,), torch.ones(6, requires_grad=True)),
    "product": lambda x: saved(x) * saved(x + 1),
    "product with a number": lambda x: saved(x) * 3.0,
    "quotient": lambda x: saved(x) / 3.0,
    "sum": lambda x: torch.add(saved(x), saved(x * 2), alpha=2),
    "difference": lambda x: saved(x) - saved(x * 2),
    "cast": lambda x: saved(x).to(torch.bfloat16),
    "copy of a transposed": lambda x: saved(x).transpose(1, 3).contiguous(),
    "copy of a permuted": lambda x: saved(x).permute(0, 2, 3, 1).contiguous(),
    "view in between": lambda x: F.relu(saved(x).view(4, -1)),
    "dropout": lambda x: torch.native_dropout(saved(x), 0.5, True)[0],
    "tanh": lambda x: torch.tanh(saved(x)),
    "sigmoid": lambda x: torch.sigmoid(saved(x)),
    "leaky relu": lambda x: F.leaky_relu(x, 0.2),
    "relu6": F.relu6,
    "softplus": F.softplus,
    "linear layer": lambda x: F.linear(x[0, 0], MATRIX, BIAS),
    "linear layer without a bias": lambda x: F.linear(x[0, 0], MATRIX),
    "convolution": lambda x: F.conv2d(x, KERNEL, BIAS, stride=2, padding=1),
    "convolution without a bias, by groups": lambda x: F.conv2d(x, KERNEL[:, :4], groups=2, dilation=2),
    "transposed convolution": lambda x: F.conv_transpose2d(x, KERNEL, BIAS, 2, output_padding=1),
    "relu of batch norm of a convolution": lambda x: F.relu(
        F.batch_norm(F.conv2d(x, KERNEL, padding=1), None, None, WEIGHT, BIAS, True)
    ),
    "tanh of a linear layer": lambda x: torch.tanh(F.linear(x[0], MATRIX, BIAS)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_recomputed_bit_for_bit(name: str) -> None:
    packer = Packer()
    with packer.on():
        made = OPERATIONS[name](X.clone().requires_grad_() * 1)
    assert_bitwise(packer.again(made), made)


FROZEN = torch.zeros(8)


@pytest.mark.parametrize(
    "normalise",
    [
        pytest.param(lambda x: F.group_norm(x, 2, WEIGHT, FROZEN), id="group norm, frozen"),
        pytest.param(lambda x: F.group_norm(x, 2, WEIGHT, BIAS.sin()), id="group norm, made by what saves none of it"),
        pytest.param(lambda x: F.batch_norm(x, None, None, WEIGHT, FROZEN, True), id="batch norm, frozen"),
        pytest.param(lambda x: F.batch_norm(x, None, None, WEIGHT, BIAS.sin(), True), id="batch norm, made"),
        pytest.param(lambda x: F.batch_norm(x, None, None, None, FROZEN, True), id="batch norm without a weight"),
        pytest.param(lambda x: F.batch_norm(x, None, None, None, None, True), id="batch norm without any"),
    ],
)
def test_a_normalisation_has_no_formula_where_its_bias_cannot_be_had(normalise: Callable[[Tensor], Tensor]) -> None:
    """The node does not tell one that is frozen from none. While it was zero the bits were the same without it."""
    packer = Packer()
    with packer.on():
        made = normalise(X.clone().requires_grad_() * 1)
    assert packer.again(made) is None


def test_the_formula_of_a_convolution_tells_the_shapes_it_is_for() -> None:
    """The algorithm follows from them, and with it the last bit."""
    packer = Packer()
    with packer.on():
        of = [F.conv2d(X[:n].clone().requires_grad_() * 1, KERNEL, BIAS, stride=2) for n in (4, 3)]
        small = F.conv2d(X[..., :5].clone().requires_grad_() * 1, KERNEL, BIAS, stride=2)  # of another input, as large
    names = {formula.name for made in (*of, small) if (formula := find(base_of(made), packer.source())) is not None}
    assert names == {
        f"ConvolutionBackward0[{shapes}](.,.,.)"
        for shapes in (
            "4x8x2x2, 4x8x6x6, 8x8x3x3",
            "3x8x2x2, 3x8x6x6, 8x8x3x3",
            "4x8x2x2, 4x8x6x5, 8x8x3x3",
        )
    }


@pytest.mark.parametrize("epsilon", [1e-5, 1e-3])
def test_a_normalisation_takes_the_epsilon_of_its_module(epsilon: float) -> None:
    packer, norm = Packer(), nn.LayerNorm(6, eps=epsilon)
    with packer.on():
        made = norm(X.clone().requires_grad_() * 1)
    assert packer.again(made) is None
    note_epsilon(norm, made)
    assert_bitwise(packer.again(made), made)


def test_a_full_backward_hook_does_not_hide_which_epsilon_a_normalisation_takes() -> None:
    packer, norm = Packer(), nn.LayerNorm(6, eps=1e-3)
    made: list[Tensor] = []
    norm.register_forward_hook(lambda _, args, output: made.append(output))
    norm.register_full_backward_hook(lambda *_: None)
    with packer.on():
        output = norm(X.clone().requires_grad_() * 1)
    assert output.grad_fn is not made[0].grad_fn
    note_epsilon(norm, output)
    assert_bitwise(packer.again(made[0]), made[0])


def test_what_no_saved_tensor_leads_to_has_no_formula() -> None:
    packer = Packer()
    with packer.on():
        x = X.clone().requires_grad_() * 1
        for made in (x + x, torch.relu(x), F.linear(x, torch.randn(6, 6)), x.exp(), x):
            assert packer.again(made) is None


def test_a_parameter_that_has_changed_is_no_input() -> None:
    packer = Packer()
    with packer.on():
        made = WEIGHT.to(torch.bfloat16)
    source = packer.source()
    assert find(made, source) is not None
    with torch.no_grad():
        WEIGHT.add_(0)
    assert find(made, source) is None


def test_a_search_tells_the_sites_that_it_found() -> None:
    packer = Packer()
    with packer.on():
        x = X.clone().requires_grad_() * 1
        other = x * 2
        graphs.append(other.square())
        note(other, packed := (other.detach(), 0), "Model.block:3")
        source = packer.source()
        assert find(torch.relu(other), source) is not None
    assert source.found == {"Model.block:3"}
    assert packed[1] == 0  # held until here, as by the graph


def test_a_formula_outlives_the_nodes_it_was_found_by() -> None:
    packer = Packer()
    with packer.on():
        x = X.clone().requires_grad_() * 1
        made = F.gelu(x)
        formula = find(made, packer.source())
        made.sum().backward()
    assert formula is not None
    assert_bitwise(run(formula, packer.unpack), made)


def test_nothing_is_kept_alive_by_a_note() -> None:
    packer = Packer()
    with packer.on():
        x = X.clone().requires_grad_() * 1
        made = torch.relu(x)
    note(x, (torch.zeros(1), 0), "")
    assert packer.again(made) is None


@pytest.fixture
def elementwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The half of batch normalisation that follows the statistics; PyTorch has it on GPUs only."""

    def elementwise(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor, epsilon: float) -> Tensor:
        shape = (1, -1, 1, 1)
        scale = (inverse * weight).view(shape)
        return (x - mean.view(shape)) * scale + bias.view(shape)

    monkeypatch.setattr(operations, "_on_gpu", lambda node: True)
    monkeypatch.setattr(fused, "_elemt", elementwise)


@pytest.mark.parametrize(("length", "affine"), [(48, True), (48, False), (36, True)])
def test_on_a_gpu_layer_norm_takes_the_statistics_that_were_saved(
    length: int, affine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows are of a kind that the kernel knows; otherwise PyTorch's does it."""
    calls = []

    def kernel(rows: fused_layer_norm.Rows, length: int) -> Tensor:
        calls.append(length)
        x, weight, bias, mean, inverse = rows
        return weight * (inverse.view(-1, 1) * (x.view(-1, length) - mean.view(-1, 1))).view(x.shape) + bias

    monkeypatch.setattr(operations, "_on_gpu", lambda node: True)
    monkeypatch.setattr(fused_layer_norm, "_exact", lambda *_, centred: True)
    monkeypatch.setattr(fused_layer_norm, "_at_once", kernel)
    packer, norm = Packer(), nn.LayerNorm(length, eps=1e-3, elementwise_affine=affine)
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    with packer.on():
        made = norm(torch.randn(4, 5, length, requires_grad=True) * 1)
    note_epsilon(norm, made)
    again = packer.again(made)
    assert again is not None
    torch.testing.assert_close(again, made.detach())
    assert calls == ([48] if affine and length == 48 else [])


@pytest.mark.parametrize("known", [True, False])
def test_rms_norm_takes_the_root_mean_square_that_was_saved(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rows, without a mean or a bias, where they are of a kind that the kernel knows. On a CPU no node keeps it."""
    calls = []

    def kernel(rows: fused_layer_norm.Rows, length: int) -> Tensor:
        x, weight, *centre, inverse = rows
        calls.append((length, centre))
        return weight * (inverse * x)

    monkeypatch.setattr(fused_layer_norm, "_exact", lambda *_, centred: known and not centred)
    monkeypatch.setattr(fused_layer_norm, "_at_once", kernel)
    x, weight = torch.randn(4, 5, 48), torch.rand(48)
    made, inverse = torch._fused_rms_norm(x, [48], weight, 1e-3)
    torch.testing.assert_close(fused_layer_norm.rms_norm(x, weight, inverse, [48], 1e-3), made)
    assert calls == ([(48, [None, None])] if known else [])


def normalised(x: Tensor) -> Tensor:
    return F.batch_norm(x, torch.zeros(8), torch.ones(8), WEIGHT, BIAS, True)


@pytest.mark.usefixtures("elementwise")
def test_on_a_gpu_batch_norm_takes_the_statistics_that_were_saved() -> None:
    packer = Packer()
    with packer.on():
        x = saved(X.clone().requires_grad_())
        y = saved(normalised(x))
        again = packer.again(y)
    assert again is not None
    torch.testing.assert_close(again, y.detach())


AFTER_IT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda x, y: F.relu_(normalised(x)),
    "sum": lambda x, y: saved(normalised(x) + y),
    "sum and relu": lambda x, y: F.relu_(normalised(x) + y),
    "sum in place and relu": lambda x, y: F.relu_(normalised(x).add_(y)),
    "sum of two and relu": lambda x, y: F.relu_(normalised(x) + normalised(y)),
    "weighted sum": lambda x, y: saved(torch.add(normalised(x), y, alpha=2)),
    "difference": lambda x, y: saved(normalised(x) - y),
}


@pytest.mark.usefixtures("elementwise")
@pytest.mark.parametrize("name", AFTER_IT)
@pytest.mark.parametrize("at_once", [True, False])
def test_what_follows_batch_norm_is_made_with_it(name: str, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[bool, bool]] = []

    def kernel(x: Tensor, affine: fused.Affine, addend: Tensor | None, clamp: bool) -> Tensor:
        calls.append((addend is not None, clamp))
        return fused._one_by_one(x, affine, 0.0, addend, clamp)

    monkeypatch.setattr(fused, "_exact", lambda *_: at_once)
    monkeypatch.setattr(fused, "_at_once", kernel)
    packer, x = Packer(), X.to(memory_format=torch.channels_last).requires_grad_()
    with packer.on():
        made = AFTER_IT[name](saved(x * 1), saved(x * 2))
        again = packer.again(made)
    assert again is not None
    torch.testing.assert_close(again, made.detach())
    combined = {"relu": [(False, True)], "sum": [(True, False)]}.get(name, [(True, True)] if "relu" in name else [])
    assert calls == (combined if at_once else [])


@pytest.mark.usefixtures("elementwise")
def test_a_bias_that_is_recomputed_is_recomputed_in_every_period() -> None:
    """Where it is 0 when the formula is tried, so is each of its operands: that trial tells nothing."""
    packer = Packer()
    with packer.on():
        x = saved(X.clone().requires_grad_())
        one, two = (saved(torch.full((8,), value, requires_grad=True) * 1) for value in (1.0, 2.0))
        y = saved(F.relu(F.batch_norm(x, torch.zeros(8), torch.ones(8), WEIGHT, one + two, True)))
        again = packer.again(y)
    assert again is not None
    torch.testing.assert_close(again, y.detach())


def test_without_a_gpu_nothing_is_made_at_once() -> None:
    assert not fused._exact(torch.device("cpu"), torch.float32, torch.float32, True, True)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("ReluBackward0(.)", [0]),
        ("ReluBackward0(AddBackward0(NativeBatchNormBackward0(.,.,.,.,.),.))", [5]),  # a residual block's input
        ("ReluBackward0(AddBackward0(NativeBatchNormBackward0(.,.),NativeBatchNormBackward0(.,.)))", []),
        ("ReluBackward0(AddBackward0(.,ConvolutionBackward0[8x4x1x1, 4x4x1x1](.,.)))", [0]),
        ("AddBackward0(.,.)", []),  # saved by whoever works with it, perhaps much later
    ],
)
def test_what_an_operation_at_the_end_was_given_is_there_when_its_result_is_saved(
    name: str, numbers: list[int]
) -> None:
    assert given_at_last(name) == numbers
