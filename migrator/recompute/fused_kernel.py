"""The kernels of `fused` and `fused_layer_norm`, in Triton. Imported only where that is installed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from migrator.recompute.fused import Affine
from migrator.recompute.launches import Launcher, is_aligned

ROWS, CHANNELS = 64, 64  # of one program: 32 values a thread, in loads of 16 bytes
NUMBERS = 8192  # of one program, where a row is long
COLUMNS, PIECE = 2048, 256  # of a row, at most and at least: whole rows take 6% less than pieces
IDLE = 8  # one in so many columns may lie past the row's end


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
    x, weight, bias, mean, inverse, out, rows, length, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < length
    w = tl.load(weight + column, mask=real).to(tl.float32)[None, :]
    b = tl.load(bias + column, mask=real).to(tl.float32)[None, :]
    m = tl.load(mean + row, mask=row < rows)[:, None]
    i = tl.load(inverse + row, mask=row < rows)[:, None]
    at = row[:, None] * length + column[None, :]
    mask = (row < rows)[:, None] & real[None, :]
    value = tl.load(x + at, mask=mask).to(tl.float32)
    # In PyTorch's order.
    tl.store(out + at, (w * (i * (value - m)) + b).to(out.dtype.element_ty), mask=mask)


_launch, _launch_rows = Launcher(_kernel), Launcher(_rows_kernel)


def launch(x: Tensor, addend: Tensor | None, affine: Affine, out: Tensor, *, channels: int, clamp: bool) -> None:
    """Write into `out`, on the present stream; all of `x`, `addend` and `out` have channels side by side."""
    rows = x.numel() // channels
    grid = (-(-rows // ROWS), -(-channels // CHANNELS), 1)
    add = addend is not None
    tensors = (x, addend if add else x, *affine, out)
    arguments = (*tensors, rows, channels, add, clamp, ROWS, CHANNELS)
    _on_device(_launch, special(tensors, rows, channels, (x.get_device(), add, clamp)), grid, arguments)


def launch_rows(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor, out: Tensor, *, length: int
) -> None:
    """Write into `out`, on the present stream; rows of `length` lie one after the other in `x` and `out`."""
    rows = x.numel() // length
    columns = COLUMNS
    while columns > PIECE and -length % columns * IDLE > length:
        columns //= 2
    block = NUMBERS // columns
    grid = (-(-rows // block), -(-length // columns), 1)
    tensors = (x, weight, bias, mean, inverse, out)
    arguments = (*tensors, rows, length, block, columns)
    _on_device(_launch_rows, special(tensors, rows, length, (x.get_device(), columns)), grid, arguments)


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
