"""Normalise, add and clamp in one pass: what follows a convolution, recomputed at a third of the traffic.

PyTorch makes ``relu(batch_norm(x) + y)`` in three kernels, each of which reads and writes all of it; memory is all
they take. Where Triton is there, one kernel makes the same bits: it rounds where they round. Whether it does so on
this device is seen once; otherwise, or for layouts it does not know, PyTorch's own kernels do it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("tiers")

_elemt: Any = torch.batch_norm_elemt
DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}

Affine = Sequence[Tensor | None]
"""Weight, bias, mean and the inverse of the standard deviation: one number a channel, or no weight and no bias."""


@dataclass(slots=True)
class Plainly:
    """While PyTorch's own kernels are to do it: whether ours would have been asked."""

    asked: bool = False


class _OfThread(threading.local):
    plainly: Plainly | None = None


_present = _OfThread()


@contextmanager
def plainly() -> Iterator[Plainly]:
    """In this thread PyTorch's own kernels do it: what they need, and ours do not, is to be tried as well."""
    before, _present.plainly = _present.plainly, Plainly()
    try:
        yield _present.plainly
    finally:
        _present.plainly = before


def at_once() -> bool:
    """Whether kernels of ours may do it."""
    if _present.plainly is None:
        return True
    _present.plainly.asked = True
    return False


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
    add = addend is not None
    if (
        (add or clamp)
        and at_once()
        and weight is not None
        and bias is not None
        and weight.is_contiguous()
        and bias.is_contiguous()
        and _fits(x, addend)
        and _exact(x.device, x.dtype, weight.dtype, add, clamp)
    ):
        return _at_once(x, affine, addend, clamp)
    return _one_by_one(x, affine, epsilon, addend, clamp)


def _one_by_one(x: Tensor, affine: Affine, epsilon: float, addend: Tensor | None, clamp: bool) -> Tensor:
    made: Tensor = _elemt(x, *affine, epsilon)
    if addend is not None:
        made = made + addend
    return made.relu_() if clamp else made


def _at_once(x: Tensor, affine: Affine, addend: Tensor | None, clamp: bool) -> Tensor:
    out = torch.empty_like(x)
    _launch()(x, addend, affine, out, channels=out.size(1), clamp=clamp)
    return out


@cache
def _launch() -> Callable[..., None]:
    from torch_tiers.migrator.recompute.fused_kernel import launch  # which needs Triton

    return launch


def _fits(x: Tensor, addend: Tensor | None) -> bool:
    """Whether the kernel knows the layout: channels side by side, and a type that is computed in float32."""
    layout = _LAYOUTS.get(x.dim())
    if layout is None or x.dtype not in DTYPES or not x.is_contiguous(memory_format=layout):
        return False
    return addend is None or (addend.stride() == x.stride() and addend.size() == x.size() and addend.dtype is x.dtype)


@cache
def _exact(device: torch.device, dtype: torch.dtype, affine: torch.dtype, add: bool, clamp: bool) -> bool:
    """Whether the kernel gives the bits of PyTorch's own on this device; seen on numbers of every size."""
    random = numbers(device)
    if random is None:
        return False
    x, addend = (random(3, 96, 37, 41, dtype=dtype).to(memory_format=torch.channels_last) for _ in range(2))
    weight, bias = (random(96, dtype=affine) for _ in range(2))
    given = (weight, bias, random(96, dtype=torch.float32), random(96, dtype=torch.float32).abs())
    expected = _one_by_one(x, given, 0.0, addend if add else None, clamp)
    return makes("batch normalisation", lambda: _at_once(x, given, addend if add else None, clamp), expected)


def has_triton(device: torch.device) -> bool:
    """Whether Triton is there, and has kernels for the device."""
    return device.type == "cuda" and find_spec("triton") is not None


def numbers(device: torch.device) -> Callable[..., Tensor] | None:
    """Makes tensors of a shape and type, with numbers of every size; None on devices that Triton has no kernels for."""
    if not has_triton(device):
        return None
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, dtype: torch.dtype) -> Tensor:
        exponents = torch.randint(-8, 9, shape, generator=generator, device=device)
        return (torch.randn(shape, generator=generator, device=device) * torch.exp2(exponents)).to(dtype)

    return random


def makes(what: str, make: Callable[[], Tensor], expected: Tensor) -> bool:
    """Whether a kernel of ours gives the bits that are expected."""
    try:
        with torch.cuda.device(expected.device):
            # Twice: the first compiles, and only the second is launched as all later ones are.
            made = [make() for _ in range(2)]
    except Exception as error:  # Triton has many, and without a compiler for its launcher this is one of them
        log.info("%s is recomputed by PyTorch's kernels, as Triton's failed: %s", what, error)
        return False
    bits = torch.int32 if expected.dtype == torch.float32 else torch.int16
    return all(torch.equal(one.view(bits), expected.view(bits)) for one in made)
