"""A GELU of bfloat16 again, as fast as its memory can be read and written.

PyTorch computes the error function to the last digits of float32, and rounds the result to 8 bits. That is more than a
GPU has time for between reading and writing: on an H100 that trains, 256 MiB take 217 us, and 178 with a polynomial
that is as good as 8 bits ask for. All bits have to come out alike, and of bfloat16 there are but 65,536 numbers:
whether they do for every one is seen once on each device. Where they do not, PyTorch's own kernel does it; so for
float16, with three bits more, for which no polynomial of this length is good enough.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from torch_tiers.migrator.recompute.fused import at_once, has_triton, makes
from torch_tiers.migrator.recompute.launches import is_aligned

_gelu = torch.ops.aten.gelu

Coefficients = tuple[float, ...]

WAYS: dict[str, tuple[Coefficients, ...]] = {
    "none": (
        # As CUDA 13's error function, which is up to one step of 2^-24 off, and as one that is not.
        (-1.62787926, -0.918802679, -0.147963285, 0.0293915868, -0.00325644389, 0.000153872097, -1e-5),
        (-1.62802589, -0.917335033, -0.151875257, 0.0333668888, -0.00495982822, 0.000424092897, -1.46925404e-5),
    ),
    "tanh": ((),),
}
"""What the kernel takes, by what PyTorch's takes for ``approximate``; the first that gives its bits is used.

With coefficients c, erfc(z) = 2^(z (c0 + c1 z + ... + c6 z^6)) for z >= 0. How far that may be off for bfloat16 to come
out as PyTorch's are two bounds for each number, linear in c when the logarithm is taken: of the first set, a linear
program gave the c that are farthest from all of these, 41 units in the last place of float32. The second is fitted by
least squares, weighed by what rounds away.
"""


def gelu(x: Tensor, approximate: str) -> Tensor:
    """``torch.nn.functional.gelu(x, approximate=approximate)``, to the bit."""
    if x.is_cuda and _fits(x) and not _fills() and at_once() and (way := _exact(x.device, approximate)) is not None:
        return _at_once(x, way)
    made: Tensor = _gelu(x, approximate=approximate)
    return made


def _at_once(x: Tensor, way: Coefficients) -> Tensor:
    out = torch.empty_like(x)
    _launch()(x, out, way)
    return out


@cache
def _launch() -> Callable[..., None]:
    from torch_tiers.migrator.recompute.fused_kernel import launch_gelu  # which needs Triton

    return launch_gelu


def _fits(x: Tensor) -> bool:
    """Whether the kernel knows the layout: one number after the other, the first at a multiple of 16 bytes."""
    return x.dtype is torch.bfloat16 and x.is_contiguous() and is_aligned((x,), x.numel())


def _fills() -> bool:
    """Whether PyTorch writes to all memory that it is asked for, which takes longer than the kernel saves.

    Its own does not ask in that way.
    """
    return torch.are_deterministic_algorithms_enabled() and torch._C._get_deterministic_fill_uninitialized_memory()


@cache
def _exact(device: torch.device, approximate: str) -> Coefficients | None:
    """What has the kernel give the bits of PyTorch's own for every number there is, on this device; None if nothing."""
    if not has_triton(device):
        return None
    every = torch.arange(1 << 16, device=device).to(torch.int16).view(torch.bfloat16)
    expected = _gelu(every, approximate=approximate)
    return next((way for way in WAYS[approximate] if makes("GELU", partial(_at_once, every, way), expected)), None)
