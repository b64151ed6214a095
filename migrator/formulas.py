"""How cheap operations are done again: from a node of the graph to a formula over tensors that backward keeps anyway.

A node keeps what its own backward needs (`grad_fn._saved_*`), which for many operations is all that its forward
needed. What it does not keep may be another saved tensor, or have a formula itself: the rest is found along the graph.
A formula takes packed tensors, never nodes: it stays good when backward has released the node, and makes no reference
cycle.

Whether a formula gives the same bits is not decided here: see `migrator.trials`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from migrator.timing import PRODUCT

DEPTH = 6  # operations in one formula

Run = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class Formula:
    """An operation, or several, over packed tensors.

    Attributes
    ----------
    name : str
        The operations, such as ``ReluBackward0(CudnnBatchNormBackward0(.,.,.))``: equal for equal formulas.
    inputs : tuple
        What the hooks packed.
    run : callable
        Makes the tensor out of the unpacked inputs.
    """

    name: str
    inputs: tuple[Any, ...]
    run: Run


def operation(name: str) -> str:
    """What a formula is called in a trace: its last operation, and whether a matrix product comes before."""
    last, _, before = name.partition("(")
    return f"{last}({PRODUCT})" if PRODUCT in before else last


class Source(Protocol):
    """Where formulas find their inputs."""

    def is_fresh(self, node: Any) -> bool:
        """Whether a node was made in the forward that is under way: autocast caches casts of weights for longer."""

    def packed(self, node: Any, name: str) -> Any:
        """What was packed of the tensor that `node` saved as `name`; None if there is none, or it is not ours."""

    def made_by(self, node: Any, output: int) -> Any:
        """What was packed of that output of a node; None if it was not saved, or is gone."""

    def leaf(self, tensor: Tensor) -> Any:
        """Pack a leaf of the graph; None if it may be another than it was when the node read it."""

    def epsilon(self, node: Any) -> float | None:
        """The epsilon of a normalisation whose node does not tell."""


def formula(node: Any, source: Source, depth: int = DEPTH) -> Formula | None:
    """The formula for the first output of `node`; None if there is none."""
    build = _TABLE.get(node.name())
    if build is None or not depth or not source.is_fresh(node):
        return None
    return build(node, _Operands(node, source, depth - 1))


class _Operands:
    """Operands of one node, as formulas."""

    def __init__(self, node: Any, source: Source, depth: int) -> None:
        self.node = node
        self.source = source
        self._depth = depth

    def saved(self, name: str) -> Formula | None:
        packed = self.source.packed(self.node, name)
        return None if packed is None else Formula(".", (packed,), _first)

    def input(self, k: int) -> Formula | None:
        """The k-th input: itself if it was saved, or made again."""
        inputs = self.node.next_functions
        node, output = inputs[k] if k < len(inputs) else (None, 0)
        if node is None:
            return None
        if node.name() == "torch::autograd::AccumulateGrad":
            packed = self.source.leaf(node.variable)
            return None if packed is None else Formula(".", (packed,), _first)
        packed = self.source.made_by(node, output)
        if packed is not None:
            return Formula(".", (packed,), _first)
        return formula(node, self.source, self._depth) if output == 0 else None

    def either(self, name: str, k: int) -> Formula | None:
        return self.saved(name) or self.input(k)

    def join(self, run: Callable[..., Tensor], *operands: Formula | None) -> Formula | None:
        """The formula that applies `run` to the operands; None if one is missing."""
        found = [operand for operand in operands if operand is not None]
        if len(found) < len(operands):
            return None
        cuts = [0]
        for operand in found:
            cuts.append(cuts[-1] + len(operand.inputs))

        def apply(values: Sequence[Tensor]) -> Tensor:
            return run(*(f.run(values[low:high]) for f, low, high in zip(found, cuts, cuts[1:], strict=False)))

        name = f"{self.node.name()}({','.join(operand.name for operand in found)})"
        return Formula(name, tuple(packed for operand in found for packed in operand.inputs), apply)


def _first(values: Sequence[Tensor]) -> Tensor:
    return values[0]


Build = Callable[[Any, _Operands], Formula | None]


def _of_saved(run: Callable[..., Tensor], *settings: str) -> Build:
    """An operation on the tensor that its node keeps as ``self``."""

    def build(node: Any, operands: _Operands) -> Formula | None:
        values = [getattr(node, f"_saved_{name}") for name in settings]
        return operands.join(lambda x: run(x, *values), operands.saved("self"))

    return build


def _of_input(run: Callable[[Tensor], Tensor]) -> Build:
    """An operation whose node keeps its result: its input must be found elsewhere."""
    return lambda node, operands: operands.join(run, operands.input(0))


def _of_two(run: Callable[[Tensor, Tensor], Tensor]) -> Build:
    return lambda node, operands: operands.join(run, operands.either("self", 0), operands.either("other", 1))


def _sum(node: Any, operands: _Operands) -> Formula | None:
    alpha, subtract = node._saved_alpha, node.name() == "SubBackward0"
    run = torch.sub if subtract else torch.add
    return operands.join(lambda x, y: run(x, y, alpha=alpha), operands.input(0), operands.input(1))


def _with_affine(
    operands: _Operands, run: Callable[..., Tensor], k: int | None, *saved: Formula | None
) -> Formula | None:
    """A normalisation of what was saved, the input first, with weight and bias where there are any.

    A bias that is not kept is input `k`. `run` takes input, weight, bias and the rest of `saved`.
    """
    weight = operands.saved("weight")
    bias = operands.saved("bias") if k is None else operands.input(k)
    given = [f for f in (weight, bias) if f is not None]

    def apply(x: Tensor, *values: Tensor) -> Tensor:
        rest, affine = values[: len(saved) - 1], list(values[len(saved) - 1 :])
        return run(x, affine.pop(0) if weight else None, affine.pop(0) if bias else None, *rest)

    return operands.join(apply, *saved, *given)


def _layer_norm(node: Any, operands: _Operands) -> Formula | None:
    shape, epsilon = list(node._saved_normalized_shape), operands.source.epsilon(node)
    if epsilon is None:
        return None
    return _with_affine(
        operands,
        lambda x, weight, bias: torch.native_layer_norm(x, shape, weight, bias, epsilon)[0],
        None,
        operands.saved("input"),
    )


def _rms_norm(node: Any, operands: _Operands) -> Formula | None:
    shape, epsilon = list(node._saved_normalized_shape), operands.source.epsilon(node)
    weight = operands.saved("weight")
    if epsilon is None:
        return None
    return operands.join(
        lambda x, *affine: torch._fused_rms_norm(x, shape, affine[0] if affine else None, epsilon)[0],
        operands.saved("input"),
        *([weight] if weight else []),
    )


def _group_norm(node: Any, operands: _Operands) -> Formula | None:
    sizes = (node._saved_N, node._saved_C, node._saved_HxW, node._saved_group)
    epsilon = node._saved_eps
    return _with_affine(
        operands,
        lambda x, weight, bias: torch.native_group_norm(x, weight, bias, *sizes, epsilon)[0],
        2,
        operands.saved("input"),
    )


def _batch_norm(node: Any, operands: _Operands) -> Formula | None:
    if not node._saved_training:
        return None
    x = operands.saved("input")
    run: Callable[..., tuple[Tensor, ...]] = torch.native_batch_norm
    epsilon = getattr(node, "_saved_eps", None)
    if epsilon is None:
        epsilon, run = node._saved_epsilon, torch.cudnn_batch_norm
    elif _on_gpu(node):
        # The batch's statistics were saved: what is left is the elementwise kernel with which the forward ended.
        mean, inverse = operands.saved("result1"), operands.saved("result2")
        return _with_affine(
            operands,
            lambda x, weight, bias, mean, inverse: torch.batch_norm_elemt(x, weight, bias, mean, inverse, epsilon),
            2,
            x,
            mean,
            inverse,
        )
    # Without running statistics the kernel computes the batch's, as it did, and updates none.
    return _with_affine(operands, lambda x, weight, bias: run(x, weight, bias, None, None, True, 0.0, epsilon)[0], 2, x)


def _on_gpu(node: Any) -> bool:
    device: torch.device = node._input_metadata[0].device
    return device.type == "cuda"


def _linear(node: Any, operands: _Operands) -> Formula | None:
    # The matrix product itself: dearer than the rest of the table by far, and still cheaper than all of a block.
    alpha, beta = node._saved_alpha, node._saved_beta
    return operands.join(
        lambda bias, x, weight: torch.addmm(bias, x, weight, beta=beta, alpha=alpha),
        operands.input(0),
        operands.saved("mat1"),
        operands.saved("mat2"),
    )


def _product(node: Any, operands: _Operands) -> Formula | None:
    return operands.join(torch.mm, operands.saved("self"), operands.saved("mat2"))


def _dropout(node: Any, operands: _Operands) -> Formula | None:
    scale = 1 / (1 - node._saved_p) if node._saved_p < 1 else 0.0
    return operands.join(lambda x, mask: x * mask * scale, operands.input(0), operands.saved("result1"))


def _cast(node: Any, operands: _Operands) -> Formula | None:
    dtype = node._input_metadata[0].dtype
    return operands.join(lambda x: x.to(dtype), operands.input(0))


def _view(node: Any, operands: _Operands) -> Formula | None:
    shape = list(node._input_metadata[0].shape)
    return operands.join(lambda x: x.view(shape), operands.input(0))


def _transpose(node: Any, operands: _Operands) -> Formula | None:
    dims = (_signed(node._saved_dim0), _signed(node._saved_dim1))
    return operands.join(lambda x: x.transpose(*dims), operands.input(0))


def _permute(node: Any, operands: _Operands) -> Formula | None:
    dims = [_signed(dim) for dim in node._saved_dims]
    return operands.join(lambda x: x.permute(dims), operands.input(0))


def _signed(dim: int) -> int:
    return dim - (1 << 64) if dim >= 1 << 63 else dim  # kept as an unsigned number


_ops = torch.ops.aten

_TABLE: Mapping[str, Build] = {
    "AddBackward0": _sum,
    "AddmmBackward0": _linear,
    "CloneBackward0": _of_input(lambda x: x.clone(memory_format=torch.contiguous_format)),
    "CudnnBatchNormBackward0": _batch_norm,
    "DivBackward0": _of_two(torch.div),
    "FusedRmsNormBackward0": _rms_norm,
    "GeluBackward0": _of_saved(lambda x, approximate: _ops.gelu(x, approximate=approximate), "approximate"),
    "HardtanhBackward0": _of_saved(_ops.hardtanh, "min_val", "max_val"),
    "LeakyReluBackward0": _of_saved(_ops.leaky_relu, "negative_slope"),
    "MmBackward0": _product,
    "MulBackward0": _of_two(torch.mul),
    "NativeBatchNormBackward0": _batch_norm,
    "NativeDropoutBackward0": _dropout,
    "NativeGroupNormBackward0": _group_norm,
    "NativeLayerNormBackward0": _layer_norm,
    "PermuteBackward0": _permute,
    "ReluBackward0": _of_input(torch.relu),
    "SigmoidBackward0": _of_input(torch.sigmoid),
    "SiluBackward0": _of_saved(_ops.silu),
    "SoftplusBackward0": _of_saved(_ops.softplus, "beta", "threshold"),
    "SubBackward0": _sum,
    "TBackward0": _of_input(lambda x: x.t()),
    "TanhBackward0": _of_input(torch.tanh),
    "ToCopyBackward0": _cast,
    "TransposeBackward0": _transpose,
    "UnsafeViewBackward0": _view,
    "ViewBackward0": _view,
}
