"""How cheap operations are done again: from a node of the graph to a formula over tensors that backward keeps anyway.

A node keeps what its own backward needs (`grad_fn._saved_*`), which for many operations is all that its forward
needed. What it does not keep may be another saved tensor, or have a formula itself: the rest is found along the graph.
A formula takes packed tensors, never nodes: it stays good when backward has released the node, and makes no reference
cycle.

Whether a formula gives the same bits is not decided here: see `migrator.recompute.trials`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torch_tiers.migrator.recompute.ways import (
    Absent,
    Again,
    Answer,
    Epsilon,
    Leaf,
    Passed,
    Saved,
    Setting,
    Shapes,
    Source,
    Way,
    input_of,
    is_leaf,
    shapes,
)
from torch_tiers.migrator.timing import product_in

DEPTH = 6  # operations in one formula
SAVE_WHAT_THEY_MAKE = frozenset({"ReluBackward0", "SigmoidBackward0", "TanhBackward0"})
SUM = "AddBackward0"

Run = Callable[[Sequence[Tensor]], Tensor]
AddAndClamp = Callable[[Sequence[Tensor], Tensor, bool], Tensor]


class Formula(NamedTuple):
    """An operation, or several, over packed tensors.

    Attributes
    ----------
    name : str
        The operations, such as ``ReluBackward0(CudnnBatchNormBackward0(.,.,.))``: equal for equal formulas.
    inputs : tuple
        What the hooks packed.
    run : callable
        Makes the tensor out of the unpacked inputs.
    clamped : callable, optional
        Makes a ReLU of it at once.
    added : callable, optional
        Makes its sum with another tensor at once, and a ReLU of that if told so.
    """

    name: str
    inputs: tuple[Any, ...]
    run: Run
    clamped: Run | None = None
    added: AddAndClamp | None = None


def operation(name: str) -> str:
    """What a formula is called in a trace: its last operation, and the last product before that.

    Of a closure all operators, without its signature.
    """
    if "#" in name:
        return name.partition("#")[0]
    last, _, before = name.partition("(")
    product = product_in(before)
    return f"{last}({product})" if product else last


def given_at_last(name: str) -> list[int]:
    """Which inputs of the formula of that name were there when its result was saved, by their numbers.

    Of one whose last operation saves what it makes: those that this was given, as they are or as a sum, which is made
    right before. A residual block's input is one of them. What lies deeper may be gone by then.
    """
    found: list[int] = []
    number, path = -1, list[str]()
    for token in re.findall(r"[^(),\[\]]+(?:\[[^\]]*\])?|[()]", name):
        if token == ")":
            path.pop()
        elif token == ".":
            number += 1
            if path and path[0] in SAVE_WHAT_THEY_MAKE and all(above == SUM for above in path[1:]):
                found.append(number)
        elif token != "(":
            path.append(token)
    return found


class Pattern(NamedTuple):
    """A formula without its inputs.

    Attributes
    ----------
    what : Formula
        The formula; its inputs are numbers, in the order in which they were found.
    way : Way or None
        How it was found; None if it cannot be told whether it would be found again.
    """

    what: Formula
    way: Way | None

    def of(self, packs: Sequence[Any]) -> Formula:
        """The formula over what was found."""
        what = self.what
        return Formula(what.name, tuple([packs[number] for number in what.inputs]), what.run)


Build = Callable[["Operands"], "Formula | None"]
Table = Mapping[str, Build]
"""What builds the formula of a node, by the node's name."""


def search(node: Any, source: Source, table: Table) -> tuple[Pattern, Formula] | None:
    """The formula for the first output of `node`, by a table of operations, and its pattern; None if there is none."""
    seen = _Search(source, table)
    found = seen.formula(node, DEPTH)
    if found is None:
        return None
    what, way = found
    pattern = Pattern(what, way if seen.repeatable else None)
    return pattern, pattern.of(seen.packs)


class _Search:
    """The search for one formula, whose inputs are numbers while it lasts."""

    def __init__(self, source: Source, table: Table) -> None:
        self.source = source
        self.packs: list[Any] = []
        self.repeatable = True
        self._table = table

    def formula(self, node: Any, depth: int) -> tuple[Formula, Way] | None:
        """The formula for the first output of `node`, and the way to it."""
        build = self._table.get(node.name())
        if build is None or not depth or not self.source.is_fresh(node):
            return None
        operands = Operands(node, self, depth - 1)
        what = build(operands)
        return None if what is None else (what, Way(operands.name, tuple(operands.answers)))

    def found(self, packed: Any) -> Formula:
        """The formula for what was packed."""
        self.packs.append(packed)
        return Formula(".", (len(self.packs) - 1,), _first)


class Operands:
    """Operands of one node, as formulas; and all else that may be asked of the node."""

    def __init__(self, node: Any, search: _Search, depth: int) -> None:
        self.name: str = node.name()
        self.answers: list[Answer] = []
        self._node = node
        self._search = search
        self._depth = depth

    def ask(self, read: Callable[[Any], Any]) -> Any:
        """What `read` reads from the node."""
        value = read(self._node)
        self.answers.append(Setting(read, value))
        return value

    def shapes(self, inputs: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of what the node made, and of its first inputs; () for those that are not part of the graph."""
        value = shapes(self._node, inputs)
        self.answers.append(Shapes(value))
        return value

    def epsilon(self) -> float | None:
        """The epsilon of a normalisation whose node does not tell."""
        value = self._search.source.epsilon(self._node)
        self.answers.append(Epsilon(value))
        return value

    def saved(self, name: str) -> Formula | None:
        """What the node saved under that name."""
        name = f"_raw_saved_{name}"
        packed = self._search.source.packed(self._node, name)
        self.answers.append(Saved(name, packed is not None))
        return None if packed is None else self._search.found(packed)

    def input(self, k: int) -> Formula | None:
        """The k-th input: itself if it was saved, or recomputed."""
        node, output = input_of(self._node, k)
        if node is None:
            self.answers.append(Absent(k))
            return None
        leaf, source = is_leaf(node), self._search.source
        packed = source.leaf(node.variable) if leaf else source.made_by(node, output)
        if packed is not None:
            self.answers.append(Leaf(k) if leaf else Passed(k))
            return self._search.found(packed)
        again = None if leaf or output else self._search.formula(node, self._depth)
        if again is None:
            self._search.repeatable = False
            return None
        what, way = again
        self.answers.append(Again(k, way))
        return what

    def either(self, name: str, k: int) -> Formula | None:
        """What the node saved under that name, or else its k-th input."""
        return self.saved(name) or self.input(k)

    def join(self, run: Callable[..., Any], *operands: Formula | None) -> Formula | None:
        """The formula that applies `run` to the operands; None if one is missing."""
        found = [operand for operand in operands if operand is not None]
        if len(found) < len(operands):
            return None
        if all(operand.run is _first for operand in found):
            name = f"{self.name}({','.join('.' * len(found))})"
            return Formula(name, tuple(operand.inputs[0] for operand in found), lambda values: run(*values))
        cuts = [0]
        for operand in found:
            cuts.append(cuts[-1] + len(operand.inputs))

        def apply(values: Sequence[Tensor]) -> Any:
            return run(*(f.run(values[low:high]) for f, low, high in zip(found, cuts, cuts[1:], strict=False)))

        name = f"{self.name}({','.join(operand.name for operand in found)})"
        return Formula(name, tuple(packed for operand in found for packed in operand.inputs), apply)


def _first(values: Sequence[Tensor]) -> Tensor:
    return values[0]
