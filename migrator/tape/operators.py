"""Operators that were called, and the values that went in and came out, as plain data.

A *value* is a tensor as an operator found it, or left it: a storage, what part of it, and the state that the storage
was in. That state is the number of the operator that wrote it last. Where nothing on the tape did, or somebody wrote
unseen, it is a negative number, another one each time: two values of one storage hold the same bytes if, and only if,
their states are equal. A view is a value of its base's storage, in its base's state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Form:
    """What part of a storage a tensor is.

    Attributes
    ----------
    offset : int or None
        Bytes from its begin; None if the tensor has no strides, as nested ones.
    sizes, strides : tuple of int, or None
        In elements.
    dtype, device
        As the tensor has them.
    bits : int
        1 where it is conjugated, 2 where it is negated, once somebody reads it.
    """

    offset: int | None
    sizes: tuple[int, ...] | None
    strides: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device
    bits: int


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor at one moment.

    Attributes
    ----------
    storage : int or None
        Number of its storage on the tape. None for a tensor that has none that can be told: sparse ones, wrappers of
        subclasses, a number that PyTorch made a tensor of, an undefined one.
    state : int
        The operator that wrote it last; negative if unknown, see above. Where it has no storage, 0.
    version : int or None
        What the tensor's version counter said; None for inference tensors.
    form : Form or None
        None where there is no storage.
    """

    storage: int | None
    state: int
    version: int | None
    form: Form | None

    @property
    def producer(self) -> int | None:
        """The number of the operator that wrote its bytes last; None if that is not known, or before the tape."""
        return self.state if self.storage is not None and self.state >= 0 else None


@dataclass(frozen=True, slots=True)
class Step:
    """What calls of an operator have in common, in one record and in all.

    Attributes
    ----------
    number : int
        Of this step, as long as the process lives.
    name : str
        ``aten::add.Tensor``.
    arguments : tuple
        In the schema's order; None where there is a tensor, or what cannot be kept.
    places : tuple of (int, int)
        For each input value its argument, and its place in a list (-1: it is in none).
    inputs, outputs : tuple of Form or None
        Of the values.
    written : frozenset of int
        Arguments whose bytes the operator changes.
    random, collective : bool
        Whether it may draw random numbers; whether other ranks take part.
    whole : bool
        Whether it can be called again with `arguments` and its values.
    """

    number: int
    name: str
    arguments: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]
    inputs: tuple[Form | None, ...]
    outputs: tuple[Form | None, ...]
    written: frozenset[int]
    random: bool
    collective: bool
    whole: bool


@dataclass(frozen=True, slots=True)
class Operator:
    """One call.

    Attributes
    ----------
    number : int
        Its place on the tape: calls are in the order in which they began.
    step : Step
        What was called.
    inputs, outputs : tuple of Value
        As they were before, and after.
    thread : int
        One number for each thread of the process that ever recorded.
    stream : int
        Of the device that it ran on, as PyTorch numbers them; 0 is the default one.
    waits : bool
        Whether the host waits for the device in it, if it is one that computes by itself.
    raised : bool
        Whether it ended with an exception. Then it has no outputs.
    """

    number: int
    step: Step
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    thread: int
    stream: int
    waits: bool
    raised: bool

    @property
    def name(self) -> str:
        """``aten::add.Tensor``."""
        return self.step.name

    @property
    def writes(self) -> tuple[Value, ...]:
        """The inputs whose bytes it changed."""
        written = self.step.written
        return tuple(
            value
            for value, (argument, _) in zip(self.inputs, self.step.places, strict=True)
            if argument in written and value.storage is not None
        )
