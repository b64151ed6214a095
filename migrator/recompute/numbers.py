"""Where random numbers stand, of Python, of NumPy and of modules' own generators, and having them go on from there.

Those of PyTorch's own generators are the checkpoint's.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

GENERATORS = (torch.Generator, random.Random, np.random.Generator)

_POSITION = 4  # bytes of a C int, which follows the key of a Mersenne twister
_TWISTER = 624 * 4 + _POSITION


class Numbers:
    """Where random numbers stand.

    Parameters
    ----------
    generators
        Those besides Python's and NumPy's own, of any of the kinds in `GENERATORS`.
    """

    __slots__ = ("_numpy", "_others", "_python")

    def __init__(self, generators: Iterable[Any] = ()) -> None:
        self._python = random.getstate()
        self._numpy = _of_numpy()
        self._others = [(generator, _state(generator)) for generator in generators]

    def go_on(self) -> None:
        """Have them go on from here."""
        random.setstate(self._python)
        self._numpy.go_on()
        for generator, state in self._others:
            _set_state(generator, state)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Have them go on from here inside, and then from where they stood before that."""
        before = Numbers(generator for generator, _ in self._others)
        self.go_on()
        try:
            yield
        finally:
            before.go_on()


class _OfNumPy(NamedTuple):
    """Where NumPy's own generator stands.

    Attributes
    ----------
    words : bytes or None
        Its memory, where that tells all of `state`.
    state : dict
        What NumPy says, and is told.
    """

    words: bytes | None
    state: Any

    def go_on(self) -> None:
        """Have its numbers go on from here."""
        if self.words is None or self.words != _words():
            np.random.set_state(self.state)


_last = _OfNumPy(None, None)


def _of_numpy() -> _OfNumPy:
    """Where it stands. To ask NumPy takes 50 us, to look whether it stands where it did a fiftieth of that."""
    global _last
    words, last = _words(), _last
    if words is None or words != last.words:
        state = np.random.get_state(legacy=False)
        # Half of what makes two normal numbers is kept elsewhere; and another thread may have drawn between the two.
        told = words is not None and not state["has_gauss"] and words == _words_of(state["state"])
        last = _last = _OfNumPy(words if told else None, state)
    return last


def _words() -> bytes | None:
    """The memory of NumPy's own generator, where it is a Mersenne twister; None if the program has set another."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # which its stubs leave out
    return ctypes.string_at(generator.ctypes.state_address, _TWISTER) if type(generator) is np.random.MT19937 else None


def _words_of(state: Any) -> bytes:
    key: bytes = state["key"].tobytes()
    return key + int(state["pos"]).to_bytes(_POSITION, sys.byteorder)


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state
