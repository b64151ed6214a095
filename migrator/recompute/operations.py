"""The operations that can be done again: what each needs of its node, and how it is done.

Whether that gives the same bits is not decided here: see `migrator.recompute.trials`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from torch_tiers.migrator.recompute import fused, fused_gelu, fused_layer_norm
from torch_tiers.migrator.recompute.formulas import Build, Formula, Operands, Table
from torch_tiers.migrator.recompute.origins import tells_epsilon


def _setting(*names: str) -> Callable[[Any], Any]:
    """Reads settings that a node has saved: a tuple of them if there are several, none a float (`ways` says why)."""
    return attrgetter(*(f"_saved_{name}" for name in names))


_alpha, _beta, _epsilon, _training = (_setting(name) for name in ("alpha", "beta", "eps", "training"))
_p, _dims, _normalized_shape = (_setting(name) for name in ("p", "dims", "normalized_shape"))
_dim0_dim1 = _setting("dim0", "dim1")


def _of_saved(run: Callable[..., Tensor], *settings: str) -> Build:
    """An operation on the tensor that its node keeps as ``self``."""
    reads = [_setting(name) for name in settings]

    def build(operands: Operands) -> Formula | None:
        values = [operands.ask(read) for read in reads]
        return operands.join(lambda x: run(x, *values), operands.saved("self"))

    return build


def _of_input(run: Callable[[Tensor], Tensor]) -> Build:
    """An operation whose node keeps its result: its input must be found elsewhere."""
    return lambda operands: operands.join(run, operands.input(0))


def _of_two(run: Callable[[Tensor, Tensor], Tensor]) -> Build:
    return lambda operands: operands.join(run, operands.either("self", 0), operands.either("other", 1))


def _relu(operands: Operands) -> Formula | None:
    x = operands.input(0)
    made = operands.join(torch.relu, x)
    return made._replace(run=x.clamped) if made and x and x.clamped else made


def _sum(operands: Operands) -> Formula | None:
    alpha, subtract = operands.ask(_alpha), operands.name == "SubBackward0"
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

    A bias that is not kept is input `k`: then there have to be both, as a bias that is frozen looks like none. While it
    is zero, as most begin, the bits are the same without. `run` takes input, weight, bias and the rest of `saved`.
    """
    weight = operands.saved("weight")
    bias = operands.saved("bias") if k is None else operands.input(k)
    if k is not None and (weight is None or bias is None):
        return None
    given = [f for f in (weight, bias) if f is not None]
    rest, weighed = len(saved), len(saved) + (weight is not None)

    def apply(*values: Tensor) -> Any:
        return run(values[0], values[rest] if weight else None, values[weighed] if bias else None, *values[1:rest])

    return operands.join(apply, *saved, *given)


def _layer_norm(operands: Operands) -> Formula | None:
    shape, epsilon = list(operands.ask(_normalized_shape)), operands.epsilon()
    if epsilon is None:
        return None
    x, inverse = operands.saved("input"), operands.saved("result2")
    guessed = not operands.ask(tells_epsilon)
    if operands.ask(_on_gpu):  # by the statistics of each row, which were saved

        def run(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor) -> Tensor:
            return fused_layer_norm.layer_norm(x, weight, bias, mean, inverse, shape, epsilon, guessed=guessed)

        return _with_affine(operands, run, None, x, operands.saved("result1"), inverse)
    return _with_affine(
        operands,
        lambda x, weight, bias, inverse: fused_layer_norm.by_pytorch(
            x, weight, bias, inverse, shape, epsilon, guessed=guessed
        ),
        None,
        x,
        inverse,
    )


def _rms_norm(operands: Operands) -> Formula | None:
    shape, epsilon = list(operands.ask(_normalized_shape)), operands.epsilon()
    weight = operands.saved("weight")
    if epsilon is None or not operands.ask(tells_epsilon):  # a guess is good for as long as nobody changes his mind
        return None
    return operands.join(
        lambda x, inverse, *affine: fused_layer_norm.rms_norm(
            x, affine[0] if affine else None, inverse, shape, epsilon
        ),
        operands.saved("input"),
        operands.saved("result1"),
        *([weight] if weight else []),
    )


def _group_norm(operands: Operands) -> Formula | None:
    n, channels, area, groups = operands.ask(_group_sizes)
    epsilon = operands.ask(_epsilon)
    return _with_affine(
        operands,
        lambda x, weight, bias: torch.native_group_norm(x, weight, bias, n, channels, area, groups, epsilon)[0],
        2,
        operands.saved("input"),
    )


def _group_sizes(node: Any) -> tuple[int, int, int, int]:
    return (node._saved_N, node._saved_C, node._saved_HxW, node._saved_group)


def _batch_norm(run: Callable[..., tuple[Tensor, ...]], setting: str) -> Build:
    """A batch normalisation by `run`, whose node saves its epsilon as `setting`."""
    read = _setting(setting)

    def build(operands: Operands) -> Formula | None:
        if not operands.ask(_training):
            return None
        x, epsilon = operands.saved("input"), operands.ask(read)
        if run is torch.native_batch_norm and operands.ask(_on_gpu):
            return _elementwise(operands, x, epsilon)
        # Without running statistics the kernel computes the batch's, as it did, and updates none.
        return _with_affine(
            operands, lambda x, weight, bias: run(x, weight, bias, None, None, True, 0.0, epsilon)[0], 2, x
        )

    return build


def _elementwise(operands: Operands, x: Formula | None, epsilon: float) -> Formula | None:
    """The elementwise kernel with which a batch normalisation ended: the batch's statistics were saved."""
    mean, inverse = operands.saved("result1"), operands.saved("result2")
    weight, bias = operands.saved("weight"), operands.input(2)
    given = operands.join(_by_run, x, mean, inverse, weight, bias)  # both have to be there, see `_with_affine`
    if given is None or bias is None:
        return None

    def run(values: Sequence[Tensor], addend: Tensor | None = None, clamp: bool = False) -> Tensor:
        x, mean, inverse, scale = values[:4]
        shift = bias.run(values[4:])  # which alone may be made out of several
        return fused.normalise(x, (scale, shift, mean, inverse), epsilon, addend, clamp)

    return given._replace(run=run, clamped=lambda values: run(values, None, True), added=run)


def _by_run(*values: Tensor) -> Tensor:
    """Stands in a formula that has a `run` of its own."""
    raise NotImplementedError


def _on_gpu(node: Any) -> bool:
    device: torch.device = node._input_metadata[0].device
    return device.type == "cuda"


def _linear(operands: Operands) -> Formula | None:
    # The matrix product itself: dearer than the rest of the table by far, and still cheaper than all of a block.
    alpha, beta = operands.ask(_alpha), operands.ask(_beta)
    return operands.join(
        lambda bias, x, weight: torch.addmm(bias, x, weight, beta=beta, alpha=alpha),
        operands.input(0),
        operands.saved("mat1"),
        operands.saved("mat2"),
    )


def _product(operands: Operands) -> Formula | None:
    return operands.join(torch.mm, operands.saved("self"), operands.saved("mat2"))


_convolved = _setting("stride", "padding", "dilation", "transposed", "output_padding", "groups", "bias_sym_sizes_opt")


def _convolution(operands: Operands) -> Formula | None:
    # The last of a ResNet's bottleneck makes two thirds of what its normalisations save, for a quarter of the work.
    shapes = operands.shapes(2)  # what it makes, its input and weight
    *settings, bias = operands.ask(_convolved)
    given = [operands.saved("input"), operands.saved("weight")]
    if any(bias or ()):
        given.append(operands.input(2))

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.convolution(x, weight, bias, *settings)

    made = operands.join(run, *given)
    # cuDNN chooses an algorithm by the shapes, and for each thread anew: what was seen to hold for some, between the
    # thread of forward and that of backward, says nothing of others. So the shapes are part of the name.
    named = f"{operands.name}[{', '.join('x'.join(map(str, shape)) for shape in shapes)}]"
    return made and made._replace(name=made.name.replace(operands.name, named, 1))


def _dropout(operands: Operands) -> Formula | None:
    p = operands.ask(_p)
    scale = 1 / (1 - p) if p < 1 else 0.0
    return operands.join(lambda x, mask: x * mask * scale, operands.input(0), operands.saved("result1"))


def _dtype(node: Any) -> torch.dtype:
    dtype: torch.dtype = node._input_metadata[0].dtype
    return dtype


def _made_shape(node: Any) -> tuple[int, ...]:
    return tuple(node._input_metadata[0].shape)


def _cast(operands: Operands) -> Formula | None:
    dtype = operands.ask(_dtype)
    return operands.join(lambda x: x.to(dtype), operands.input(0))


def _view(operands: Operands) -> Formula | None:
    shape = operands.ask(_made_shape)
    return operands.join(lambda x: x.view(shape), operands.input(0))


def _transpose(operands: Operands) -> Formula | None:
    dims = [_signed(dim) for dim in operands.ask(_dim0_dim1)]
    return operands.join(lambda x: x.transpose(*dims), operands.input(0))


def _permute(operands: Operands) -> Formula | None:
    dims = [_signed(dim) for dim in operands.ask(_dims)]
    return operands.join(lambda x: x.permute(dims), operands.input(0))


def _signed(dim: int) -> int:
    return dim - (1 << 64) if dim >= 1 << 63 else dim  # kept as an unsigned number


_ops = torch.ops.aten

TABLE: Table = {
    "AddBackward0": _sum,
    "AddmmBackward0": _linear,
    "CloneBackward0": _of_input(lambda x: x.clone(memory_format=torch.contiguous_format)),
    "ConvolutionBackward0": _convolution,
    "CudnnBatchNormBackward0": _batch_norm(torch.cudnn_batch_norm, "epsilon"),
    "DivBackward0": _of_two(torch.div),
    "FusedRmsNormBackward0": _rms_norm,
    "GeluBackward0": _of_saved(fused_gelu.gelu, "approximate"),
    "HardtanhBackward0": _of_saved(_ops.hardtanh, "min_val", "max_val"),
    "LeakyReluBackward0": _of_saved(_ops.leaky_relu, "negative_slope"),
    "MmBackward0": _product,
    "MulBackward0": _of_two(torch.mul),
    "NativeBatchNormBackward0": _batch_norm(torch.native_batch_norm, "eps"),
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
