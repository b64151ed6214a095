"""Normalise, add and clamp in one pass: what follows a convolution, made again at a third of the traffic.

PyTorch makes ``relu(batch_norm(x) + y)`` in three kernels, each of which reads and writes all of it; memory is all
they take. Where Triton is there, one kernel makes the same bits: it rounds where they round. Whether it does so on
this device is seen once; otherwise, or for layouts it does not know, PyTorch's own kernels do it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("tiers")

_elemt: Any = torch.batch_norm_elemt


Affine = Sequence[Tensor | None]
"""Weight, bias, mean and the inverse of the standard deviation: one number a channel, or no weight and no bias."""


def normalise(x: Tensor, affine: Affine, epsilon: float, addend: Tensor | None = None, clamp: bool = False) -> Tensor:
    """``weight * (x - mean) * inverse + bias`` by channels, plus `addend`, and not below zero if `clamp`.

    Parameters
    ----------
    x : Tensor
        Of shape (samples, channels, ...), on a GPU.
    affine : sequence of Tensor
        Weight, bias, mean and inverse.
    epsilon : float
        What `inverse` was computed with; PyTorch's kernel asks for it and does not use it.
    addend : Tensor, optional
        Of the shape of `x`.
    clamp : bool
        Whether a ReLU comes last.
    """
    weight, bias, *_ = affine
    add, several = addend is not None, addend is not None or clamp
    if several and weight is not None and bias is not None and _fits(x, addend):
        exact = _exact(x.device, x.dtype, weight.dtype, add, clamp)
    else:
        exact = False
    return _at_once(x, affine, addend, clamp) if exact else _one_by_one(x, affine, epsilon, addend, clamp)


def _one_by_one(x: Tensor, affine: Affine, epsilon: float, addend: Tensor | None, clamp: bool) -> Tensor:
    made: Tensor = _elemt(x, *affine, epsilon)
    if addend is not None:
        made = made + addend
    return made.relu_() if clamp else made


def _at_once(x: Tensor, affine: Affine, addend: Tensor | None, clamp: bool) -> Tensor:
    from migrator.fused_kernel import launch

    out = torch.empty_like(x)
    launch(x, addend, affine, out, channels=x.size(1), clamp=clamp)
    return out


def _fits(x: Tensor, addend: Tensor | None) -> bool:
    """Whether the kernel knows the layout: channels side by side, and a type that is computed in float32."""
    if x.dim() not in (4, 5) or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    if not x.is_contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d):
        return False
    return addend is None or (addend.size(), addend.stride(), addend.dtype) == (x.size(), x.stride(), x.dtype)


@cache
def _exact(device: torch.device, dtype: torch.dtype, affine: torch.dtype, add: bool, clamp: bool) -> bool:
    """Whether the kernel gives the bits of PyTorch's own on this device; seen on numbers of every size."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, dtype: torch.dtype) -> Tensor:
        exponents = torch.randint(-8, 9, shape, generator=generator, device=device)
        return (torch.randn(shape, generator=generator, device=device) * torch.exp2(exponents)).to(dtype)

    x, addend = (random(3, 96, 37, 41, dtype=dtype).to(memory_format=torch.channels_last) for _ in range(2))
    weight, bias = (random(96, dtype=affine) for _ in range(2))
    given = (weight, bias, random(96, dtype=torch.float32), random(96, dtype=torch.float32).abs())
    try:
        made = _at_once(x, given, addend if add else None, clamp)
    except Exception as error:  # Triton has many, and without a compiler for its launcher this is one of them
        log.info("batch normalisation is made again by PyTorch's kernels, as Triton's failed: %s", error)
        return False
    expected = _one_by_one(x, given, 0.0, addend if add else None, clamp)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    return torch.equal(made.view(bits), expected.view(bits))
