"""The kernels of `fused`, `fused_layer_norm` and `fused_gelu`, in Triton. Imported only where that is installed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_tiers.migrator.recompute.fused import Affine
from torch_tiers.migrator.recompute.launches import Launcher, is_aligned

ROWS, CHANNELS = 64, 64  # of one program: 32 values a thread, in loads of 16 bytes
NUMBERS = 8192  # of one program, where a row is long
COLUMNS, PIECE = 2048, 256  # of a row, at most and at least: whole rows take 6% less than pieces
IDLE = 8  # one in so many columns may lie past the row's end
PIECES = 1024  # numbers of one program that looks at each alone


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    x, addend, weight, bias, mean, inverse, out, rows, channels,
    ADD: tl.constexpr, CLAMP: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    # The grid's first dimension is the one that may be long.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = channel < channels
    w = tl.load(weight + channel, mask=real).to(tl.float32)[None, :]
    b = tl.load(bias + channel, mask=real).to(tl.float32)[None, :]
    m = tl.load(mean + channel, mask=real)[None, :]
    i = tl.load(inverse + channel, mask=real)[None, :]
    at = row[:, None] * channels + channel[None, :]
    mask = (row < rows)[:, None] & real[None, :]
    value = tl.load(x + at, mask=mask).to(tl.float32)
    # In PyTorch's order, and rounded after each of its kernels.
    made = (w * (value - m) * i + b).to(out.dtype.element_ty)
    if ADD:
        other = tl.load(addend + at, mask=mask).to(tl.float32)
        made = (made.to(tl.float32) + other).to(out.dtype.element_ty)
    if CLAMP:
        made = tl.where(made <= 0, 0.0, made.to(tl.float32)).to(out.dtype.element_ty)  # what is no number stays none
    tl.store(out + at, made, mask=mask)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _rows_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, mean, inverse, out, rows, length,
    CENTRED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < length
    w = tl.load(weight + column, mask=real).to(tl.float32)[None, :]
    i = tl.load(inverse + row, mask=row < rows)[:, None]
    at = row[:, None] * length + column[None, :]
    mask = (row < rows)[:, None] & real[None, :]
    value = tl.load(x + at, mask=mask).to(tl.float32)
    # In PyTorch's order.
    if CENTRED:
        m = tl.load(mean + row, mask=row < rows)[:, None]
        b = tl.load(bias + column, mask=real).to(tl.float32)[None, :]
        made = w * (i * (value - m)) + b
    else:
        made = w * (i * value)
    tl.store(out + at, made.to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _gelu_kernel(  # type: ignore[no-untyped-def]
    x, out, numbers, c0, c1, c2, c3, c4, c5, c6, NUMBERS: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    value = tl.load(x + at, mask=at < numbers).to(tl.float32)
    z = value * 0.70710678118654752440  # the root of 1/2
    size = tl.abs(z)
    power = (((((c6 * size + c5) * size + c4) * size + c3) * size + c2) * size + c1) * size + c0
    # Through 1 - erfc, as PyTorch: near -1 the result has steps of 2^-24, and what they make of it is not small.
    error = _with_sign(1.0 - tl.exp2(power * size), z)
    tl.store(out + at, (value * 0.5 * (1.0 + error)).to(out.dtype.element_ty), mask=at < numbers)


@triton.jit  # type: ignore[untyped-decorator]
def _tanh_gelu_kernel(x, out, numbers, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    value = tl.load(x + at, mask=at < numbers).to(tl.float32)
    z = 0.79788456080286535588 * (value + 0.044715 * (value * value * value))  # the root of 2/pi
    tangent = _with_sign(1.0 - 2.0 / (1.0 + tl.exp2(tl.abs(z) * 2.88539008177792681472)), z)  # e^2 as a power of 2
    tl.store(out + at, (0.5 * value * (1.0 + tangent)).to(out.dtype.element_ty), mask=at < numbers)


@triton.jit
def _with_sign(size, of):  # type: ignore[no-untyped-def]
    bits = (size.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | (of.to(tl.int32, bitcast=True) & -0x80000000)
    return bits.to(tl.float32, bitcast=True)


_launch, _launch_rows = Launcher(_kernel), Launcher(_rows_kernel)
_launch_gelu, _launch_tanh_gelu = Launcher(_gelu_kernel), Launcher(_tanh_gelu_kernel)


def launch(x: Tensor, addend: Tensor | None, affine: Affine, out: Tensor, *, channels: int, clamp: bool) -> None:
    """Write into `out`, on the present stream; all of `x`, `addend` and `out` have channels side by side."""
    rows = x.numel() // channels
    grid = (-(-rows // ROWS), -(-channels // CHANNELS), 1)
    add = addend is not None
    tensors = (x, addend if add else x, *affine, out)
    arguments = (*tensors, rows, channels, add, clamp, ROWS, CHANNELS)
    _on_device(_launch, special(tensors, rows, channels, (x.get_device(), add, clamp)), grid, arguments)


def launch_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor | None,
    inverse: Tensor,
    out: Tensor,
    *,
    length: int,
) -> None:
    """Write into `out`, on the present stream; rows of `length` lie one after the other in `x` and `out`.

    With neither a bias nor means they are only scaled.
    """
    assert (bias is None) is (mean is None)
    rows = x.numel() // length
    columns = COLUMNS
    while columns > PIECE and -length % columns * IDLE > length:
        columns //= 2
    block = NUMBERS // columns
    grid = (-(-rows // block), -(-length // columns), 1)
    centred = bias is not None and mean is not None
    tensors = (x, weight, bias if centred else x, mean if centred else x, inverse, out)
    arguments = (*tensors, rows, length, centred, block, columns)
    _on_device(_launch_rows, special(tensors, rows, length, (x.get_device(), centred, columns)), grid, arguments)


def launch_gelu(x: Tensor, out: Tensor, coefficients: Sequence[float]) -> None:
    """Write the GELU of each number of `x` into `out`, on the present stream; without coefficients, that by tanh.

    Both lie as if they had one dimension, of fewer than 2^31 numbers, and are aligned.
    """
    numbers = x.numel()
    launcher = _launch_gelu if coefficients else _launch_tanh_gelu
    _on_device(launcher, x.get_device(), (-(-numbers // PIECES), 1, 1), (x, out, numbers, *coefficients, PIECES))


def _on_device(
    launcher: Launcher, special: Hashable | None, grid: tuple[int, int, int], arguments: Sequence[Any]
) -> None:
    device = arguments[0].get_device()
    if device == torch.cuda.current_device():
        launcher(special, grid, arguments)
    else:
        with torch.cuda.device(device):
            launcher(None, grid, arguments)


def special(tensors: Sequence[Any], rows: int, channels: int, rest: tuple[Hashable, ...]) -> Hashable | None:
    """What tells the kernel's specialisations apart for arguments as they mostly are; None for others.

    `rows` is not specialised on but for its width.
    """
    if rows >= 1 << 31 or not is_aligned(tensors, channels):
        return None
    return (*rest, *[tensor.dtype for tensor in tensors])
