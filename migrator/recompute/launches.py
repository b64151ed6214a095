"""Launches of a Triton kernel without Triton's look at every argument.

At each call Triton finds out which specialisation of a kernel the arguments ask for, which takes longer than the rest
of the launch. Whoever knows that himself keeps what Triton compiled, and launches that.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

log = logging.getLogger("tiers")

ALIGNED = 16
"""Triton specialises on pointers and integers that are multiples of this; and on integers that are 1."""

_INT32 = 1 << 31


def is_aligned(tensors: Sequence[Tensor], *numbers: int) -> bool:
    """Whether Triton takes all pointers and numbers for multiples of 16, and all numbers for 32 bits wide."""
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    for number in numbers:
        if not ALIGNED <= number < _INT32:
            return False
        bits |= number
    return not bits % ALIGNED


class Launcher:
    """Launches one kernel.

    Parameters
    ----------
    kernel : triton.JITFunction
        The kernel. Called for a grid, it returns what it has compiled and launched.

    Attributes
    ----------
    compiled : dict
        What it has compiled, by specialisation.
    is_short : bool
        Whether that takes the arguments that the kernel takes, as far as is known.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.compiled: dict[Hashable, Any] = {}
        self.is_short = True

    def __call__(self, special: Hashable | None, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        """Launch it on the present stream of the current device.

        Parameters
        ----------
        special : hashable or None
            The same for arguments, constants included, that ask for the same specialisation on the same device, and
            for no others; None if that is not known.
        grid : tuple of int
            Programs in each dimension.
        arguments : sequence
            All arguments in order, constants included.
        """
        compiled = self.compiled.get(special) if special is not None and self.is_short else None
        if compiled is not None:
            try:
                compiled[grid](*arguments)
                return
            except Exception as error:  # another version of Triton: then by what all versions have
                self.is_short = False
                log.info("Triton's kernels are launched the long way: %s", str(error))
        compiled = self._kernel[grid](*arguments)
        if special is not None:
            self.compiled[special] = compiled
