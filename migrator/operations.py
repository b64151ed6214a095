"""The operations that can be done again: what each needs of its node, and how it is done.

Whether that gives the same bits is not decided here: see `migrator.trials`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from migrator import fused
from migrator.formulas import Build, Formula, Operands, Table


def _of_saved(run: Callable[..., Tensor], *settings: str) -> Build:
    """An operation on the tensor that its node keeps as ``self``."""

    def build(node: Any, operands: Operands) -> Formula | None:
        values = [getattr(node, f"_saved_{name}") for name in settings]
        return operands.join(lambda x: run(x, *values), operands.saved("self"))

    return build


def _of_input(run: Callable[[Tensor], Tensor]) -> Build:
    """An operation whose node keeps its result: its input must be found elsewhere."""
    return lambda node, operands: operands.join(run, operands.input(0))


def _of_two(run: Callable[[Tensor, Tensor], Tensor]) -> Build:
    return lambda node, operands: operands.join(run, operands.either("self", 0), operands.either("other", 1))


def _relu(node: Any, operands: Operands) -> Formula | None:
    x = operands.input(0)
    made = operands.join(torch.relu, x)
    return made._replace(run=x.clamped) if made and x and x.clamped else made


def _sum(node: Any, operands: Operands) -> Formula | None:
    alpha, subtract = node._saved_alpha, node.name() == "SubBackward0"
    run = torch.sub if subtract else torch.add
    x, y = operands.input(0), operands.input(1)
    made = operands.join(lambda x, y: run(x, y, alpha=alpha), x, y)
    if made is None or x is None or y is None or x.added is None or subtract or alpha != 1:
        return made
    added, other, cut = x.added, y.run, len(x.inputs)

    def at_once(values: Sequence[Tensor], clamp: bool) -> Tensor:
        return added(values[:cut], other(values[cut:]), clamp)

    return made._replace(run=lambda values: at_once(values, False), clamped=lambda values: at_once(values, True))


def _with_affine(operands: Operands, run: Callable[..., Any], k: int | None, *saved: Formula | None) -> Formula | None:
    """A normalisation of what was saved, the input first, with weight and bias where there are any.

    A bias that is not kept is input `k`. `run` takes input, weight, bias and the rest of `saved`.
    """
    weight = operands.saved("weight")
    bias = operands.saved("bias") if k is None else operands.input(k)
    given = [f for f in (weight, bias) if f is not None]

    def apply(x: Tensor, *values: Tensor) -> Any:
        rest, affine = values[: len(saved) - 1], list(values[len(saved) - 1 :])
        return run(x, affine.pop(0) if weight else None, affine.pop(0) if bias else None, *rest)

    return operands.join(apply, *saved, *given)


def _layer_norm(node: Any, operands: Operands) -> Formula | None:
    shape, epsilon = list(node._saved_normalized_shape), operands.source.epsilon(node)
    if epsilon is None:
        return None
    return _with_affine(
        operands,
        lambda x, weight, bias: torch.native_layer_norm(x, shape, weight, bias, epsilon)[0],
        None,
        operands.saved("input"),
    )


def _rms_norm(node: Any, operands: Operands) -> Formula | None:
    shape, epsilon = list(node._saved_normalized_shape), operands.source.epsilon(node)
    weight = operands.saved("weight")
    if epsilon is None:
        return None
    return operands.join(
        lambda x, *affine: torch._fused_rms_norm(x, shape, affine[0] if affine else None, epsilon)[0],
        operands.saved("input"),
        *([weight] if weight else []),
    )


def _group_norm(node: Any, operands: Operands) -> Formula | None:
    sizes = (node._saved_N, node._saved_C, node._saved_HxW, node._saved_group)
    epsilon = node._saved_eps
    return _with_affine(
        operands,
        lambda x, weight, bias: torch.native_group_norm(x, weight, bias, *sizes, epsilon)[0],
        2,
        operands.saved("input"),
    )


def _batch_norm(node: Any, operands: Operands) -> Formula | None:
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
        given = _with_affine(operands, lambda *values: values, 2, x, mean, inverse)
        return None if given is None else _elementwise(given, epsilon)
    # Without running statistics the kernel computes the batch's, as it did, and updates none.
    return _with_affine(operands, lambda x, weight, bias: run(x, weight, bias, None, None, True, 0.0, epsilon)[0], 2, x)


def _elementwise(given: Formula, epsilon: float) -> Formula:
    """The elementwise half of a batch normalisation, by a formula that finds its arguments."""
    arguments: Any = given.run

    def run(values: Sequence[Tensor], addend: Tensor | None = None, clamp: bool = False) -> Tensor:
        affine: fused.Affine
        x, *affine = arguments(values)
        return fused.normalise(x, affine, epsilon, addend=addend, clamp=clamp)

    return given._replace(run=run, clamped=lambda values: run(values, None, True), added=run)


def _on_gpu(node: Any) -> bool:
    device: torch.device = node._input_metadata[0].device
    return device.type == "cuda"


def _linear(node: Any, operands: Operands) -> Formula | None:
    # The matrix product itself: dearer than the rest of the table by far, and still cheaper than all of a block.
    alpha, beta = node._saved_alpha, node._saved_beta
    return operands.join(
        lambda bias, x, weight: torch.addmm(bias, x, weight, beta=beta, alpha=alpha),
        operands.input(0),
        operands.saved("mat1"),
        operands.saved("mat2"),
    )


def _product(node: Any, operands: Operands) -> Formula | None:
    return operands.join(torch.mm, operands.saved("self"), operands.saved("mat2"))


def _dropout(node: Any, operands: Operands) -> Formula | None:
    scale = 1 / (1 - node._saved_p) if node._saved_p < 1 else 0.0
    return operands.join(lambda x, mask: x * mask * scale, operands.input(0), operands.saved("result1"))


def _cast(node: Any, operands: Operands) -> Formula | None:
    dtype = node._input_metadata[0].dtype
    return operands.join(lambda x: x.to(dtype), operands.input(0))


def _view(node: Any, operands: Operands) -> Formula | None:
    shape = list(node._input_metadata[0].shape)
    return operands.join(lambda x: x.view(shape), operands.input(0))


def _transpose(node: Any, operands: Operands) -> Formula | None:
    dims = (_signed(node._saved_dim0), _signed(node._saved_dim1))
    return operands.join(lambda x: x.transpose(*dims), operands.input(0))


def _permute(node: Any, operands: Operands) -> Formula | None:
    dims = [_signed(dim) for dim in node._saved_dims]
    return operands.join(lambda x: x.permute(dims), operands.input(0))


def _signed(dim: int) -> int:
    return dim - (1 << 64) if dim >= 1 << 63 else dim  # kept as an unsigned number


_ops = torch.ops.aten

TABLE: Table = {
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
    "ReluBackward0": _relu,
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
