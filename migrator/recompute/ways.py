"""The way on which a formula was found: what was asked of the graph, and what it answered.

What builds a formula sees nothing of the graph but the answers to what it asks. So where every answer is the same
again, so is the formula, but for its inputs: most sites' formulas are built once, and later only their inputs gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

_Leaf: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


class Source(Protocol):
    """Where formulas find their inputs."""

    def is_fresh(self, node: Any) -> bool:
        """Whether a node was made in the forward that is under way: autocast caches casts of weights for longer."""

    def packed(self, node: Any, name: str) -> Any:
        """What was packed of the tensor that `node` keeps as ``_raw_saved_...``; None if there is none, or not ours."""

    def made_by(self, node: Any, output: int) -> Any:
        """What was packed of that output of a node; None if it was not saved, or is gone."""

    def leaf(self, tensor: Any) -> Any:
        """Pack a leaf of the graph; None if it may be another than it was when the node read it."""

    def epsilon(self, node: Any) -> float | None:
        """The epsilon of a normalisation whose node does not tell."""


class Setting(NamedTuple):
    """The node says this of itself."""

    read: Callable[[Any], Any]
    value: Any

    def holds(self, node: Any, source: Source, packs: list[Any]) -> bool:
        """Whether the answer is the same; adds what was packed, where that is the answer, to `packs`."""
        value = self.read(node)
        return value is self.value or _is_same(value, self.value)


class Shapes(NamedTuple):
    """These are the shapes of what the node made, and of its first inputs where they are part of the graph."""

    value: tuple[tuple[int, ...], ...]

    def holds(self, node: Any, source: Source, packs: list[Any]) -> bool:
        """See `Setting.holds`."""
        return shapes(node, len(self.value) - 1) == self.value


class Epsilon(NamedTuple):
    """A normalisation's epsilon is known to be this."""

    value: float | None

    def holds(self, node: Any, source: Source, packs: list[Any]) -> bool:
        """See `Setting.holds`."""
        return _is_same(source.epsilon(node), self.value)


class Saved(NamedTuple):
    """The node saved a tensor by this name; or none."""

    name: str
    there: bool

    def holds(self, node: Any, source: Source, packs: list[Any]) -> bool:
        """See `Setting.holds`."""
        packed = source.packed(node, self.name)
        if packed is None:
            return not self.there
        packs.append(packed)
        return self.there


class Absent(NamedTuple):
    """The node has no such input."""

    k: int

    def holds(self, node: Any, source: Source, packs: list[Any]) -> bool:
        """See `Setting.holds`."""
        return input_of(node, self.k)[0] is None


class Leaf(NamedTuple):
    """That input is a leaf of the graph."""

    k: int

    def holds(self, node: Any, source: Source, packs: list[Any]) -> bool:
        """See `Setting.holds`."""
        before, _ = input_of(node, self.k)
        packed = source.leaf(before.variable) if before is not None and is_leaf(before) else None
        packs.append(packed)
        return packed is not None


class Passed(NamedTuple):
    """That input was saved, whoever saved it."""

    k: int

    def holds(self, node: Any, source: Source, packs: list[Any]) -> bool:
        """See `Setting.holds`."""
        before, output = input_of(node, self.k)
        packed = None if before is None or is_leaf(before) else source.made_by(before, output)
        packs.append(packed)
        return packed is not None


class Again(NamedTuple):
    """That input is recomputed as well."""

    k: int
    way: Way

    def holds(self, node: Any, source: Source, packs: list[Any]) -> bool:
        """See `Setting.holds`."""
        before, output = input_of(node, self.k)
        if before is None or output or not self.way.holds(before, source, packs):
            return False
        return source.made_by(before, output) is None


Answer = Setting | Shapes | Epsilon | Saved | Absent | Leaf | Passed | Again


class Way(NamedTuple):
    """What the node of that name answered, in the order of asking."""

    name: str
    answers: tuple[Answer, ...]

    def holds(self, node: Any, source: Source, packs: list[Any]) -> bool:
        """Whether `node` answers the same; adds what was packed to `packs`, in that order."""
        if node.name() != self.name or not source.is_fresh(node):
            return False
        for answer in self.answers:  # noqa: SIM110 - a generator takes longer, and all that is dropped passes here
            if not answer.holds(node, source, packs):
                return False
        return True


def follow(way: Way, node: Any, source: Source) -> list[Any] | None:
    """What was packed of a formula's inputs, if `node` answers as it did when `way` was found; None if it does not."""
    packs: list[Any] = []
    return packs if way.holds(node, source, packs) else None


_known: dict[str, Way] = {}
MOST = 4096  # ways: a program of ever new shapes must not fill memory with them


def one_of(way: Way) -> Way:
    """The one object for all equal ways: read for one site, it is in the processor's caches for the next."""
    if len(_known) >= MOST:
        _known.clear()
    return _known.setdefault(repr(way), way)


def input_of(node: Any, k: int) -> tuple[Any, int]:
    """The node that made the k-th input of `node`, and which of its outputs that is."""
    inputs: tuple[tuple[Any, int], ...] = node.next_functions
    return inputs[k] if k < len(inputs) else (None, 0)


def shapes(node: Any, inputs: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of what a node made, and of its first inputs; () for those that are not part of the graph."""
    return (tuple(node._input_metadata[0].shape), *(_shape(*input_of(node, k)) for k in range(inputs)))


def _shape(node: Any, output: int) -> tuple[int, ...]:
    if node is None:
        return ()
    return tuple((node.variable if is_leaf(node) else node._input_metadata[output]).shape)


def is_leaf(node: Any) -> bool:
    """Whether a node stands for a leaf of the graph."""
    return type(node) is _Leaf


def _is_same(one: Any, other: Any) -> bool:
    """Whether two settings are one to every operation: 1 is not 1.0 there, and 0.0 not -0.0.

    Within a tuple they are: numbers of C++ types that may be either are to be asked for by themselves.
    """
    return type(one) is type(other) and one == other and (bool(one) or str(one) == str(other))
