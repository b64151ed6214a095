"""A layer normalisation again, or one by the root mean square, by what was saved of each row: one pass over memory.

PyTorch's kernel reads each row for its statistics first, and reaches half of the memory's speed. Backward keeps those,
so that what is left is a product and a sum. Where Triton is there, one kernel makes the same bits; whether it does so
for rows of this length on this device is seen once, and otherwise PyTorch's own does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from math import prod

import torch
from torch import Tensor

from torch_tiers.migrator.recompute.fused import DTYPES, at_once, makes, numbers
from torch_tiers.migrator.recompute.launches import is_aligned

MOST = 1 << 20  # numbers on which it is seen, or one row: this may be in the midst of backward

Rows = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]
"""What is normalised, weight, bias, and for each row the mean and the inverse of the standard deviation.

Of root mean squares there is no bias and no mean.
"""


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    inverse: Tensor,
    shape: Sequence[int],
    epsilon: float,
    *,
    guessed: bool = False,
) -> Tensor:
    """``weight * inverse * (x - mean) + bias`` by rows.

    Parameters
    ----------
    x : Tensor
        On a GPU; its last dimensions are `shape`, which is a row.
    weight, bias : Tensor or None
        Of that shape.
    mean, inverse : Tensor
        One number a row, as PyTorch's kernel left them.
    shape : sequence of int
        Of a row.
    epsilon : float
        What `inverse` was computed with; only PyTorch's kernel asks for it.
    guessed : bool
        Whether nobody has said so of this one: see `by_pytorch`.
    """
    if weight is not None and bias is not None and at_once():
        rows = (x, weight, bias, mean, inverse)
        if _fits(rows, length := prod(shape)) and _exact(x.device, x.dtype, length, centred=True):
            return _at_once(rows, length)
    return by_pytorch(x, weight, bias, inverse, shape, epsilon, guessed=guessed)


def rms_norm(x: Tensor, weight: Tensor | None, inverse: Tensor, shape: Sequence[int], epsilon: float) -> Tensor:
    """``weight * inverse * x`` by rows; the parameters are those of `layer_norm`."""
    if weight is not None and at_once():
        rows = (x, weight, None, None, inverse)
        if _fits(rows, length := prod(shape)) and _exact(x.device, x.dtype, length, centred=False):
            return _at_once(rows, length)
    made: Tensor = torch._fused_rms_norm(x, list(shape), weight, epsilon)[0]
    return made


def by_pytorch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    inverse: Tensor,
    shape: Sequence[int],
    epsilon: float,
    *,
    guessed: bool,
) -> Tensor:
    """The same by PyTorch's kernel.

    Raises
    ------
    RuntimeError
        If `epsilon` was `guessed`, by what it was in another step, and is another one here. This waits for the device.
    """
    made, _, again = torch.native_layer_norm(x, shape, weight, bias, epsilon)
    if guessed and not torch.equal(again, inverse):
        raise RuntimeError(
            f"a layer normalisation was seen to take an epsilon of {epsilon:g}, and takes another one in this step. "
            "Have it be the attribute `eps` of the module that calls it, or choose a policy that recomputes nothing, "
            "such as TIERS_POLICY=flashneuron."
        )
    return made


def _at_once(rows: Rows, length: int) -> Tensor:
    out = torch.empty_like(rows[0])
    _launch()(*rows, out, length=length)
    return out


@cache
def _launch() -> Callable[..., None]:
    from torch_tiers.migrator.recompute.fused_kernel import launch_rows  # which needs Triton

    return launch_rows


def _fits(rows: Rows, length: int) -> bool:
    """Whether the kernel knows the layout: rows one after the other, that begin at multiples of 16 bytes."""
    x, weight, bias, mean, inverse = rows
    given = [tensor for tensor in rows if tensor is not None]
    return (
        x.dtype in DTYPES
        and weight.dtype is x.dtype
        and (bias is None or bias.dtype is x.dtype)
        and (mean is None or mean.dtype is torch.float32)
        and inverse.dtype is torch.float32
        and inverse.numel() * length == x.numel() > 0
        and all(tensor.is_contiguous() for tensor in given)
        and is_aligned(given, length)
    )


@cache
def _exact(device: torch.device, dtype: torch.dtype, length: int, *, centred: bool) -> bool:
    """Whether the kernel gives the bits of PyTorch's own for rows of this length on this device."""
    random = numbers(device)
    if random is None:
        return False
    rows = max(1, min(37, MOST // length))
    x, weight, bias = random(rows, length, dtype=dtype), random(length, dtype=dtype), random(length, dtype=dtype)
    given: Rows
    if centred:
        expected, mean, inverse = torch.native_layer_norm(x, [length], weight, bias, 1e-5)
        given = x, weight, bias, mean, inverse
    else:
        expected, inverse = torch._fused_rms_norm(x, [length], weight, 1e-5)
        given = x, weight, None, None, inverse
    return makes("normalisation by rows", partial(_at_once, given, length), expected)
