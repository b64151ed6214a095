"""How cheap operations are done again: from a node of the graph to a formula over tensors that backward keeps anyway.

A node keeps what its own backward needs (`grad_fn._saved_*`), which for many operations is all that its forward
needed. What it does not keep may be another saved tensor, or have a formula itself: the rest is found along the graph.
A formula takes packed tensors, never nodes: it stays good when backward has released the node, and makes no reference
cycle.

Whether a formula gives the same bits is not decided here: see `migrator.trials`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from migrator.timing import PRODUCT

DEPTH = 6  # operations in one formula

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
    """What a formula is called in a trace: its last operation, and whether a matrix product comes before."""
    last, _, before = name.partition("(")
    return f"{last}({PRODUCT})" if PRODUCT in before else last


class Source(Protocol):
    """Where formulas find their inputs."""

    def is_fresh(self, node: Any) -> bool:
        """Whether a node was made in the forward that is under way: autocast caches casts of weights for longer."""

    def packed(self, node: Any, name: str) -> Any:
        """What was packed of the tensor that `node` saved as `name`; None if there is none, or it is not ours."""

    def made_by(self, node: Any, output: int) -> Any:
        """What was packed of that output of a node; None if it was not saved, or is gone."""

    def leaf(self, tensor: Tensor) -> Any:
        """Pack a leaf of the graph; None if it may be another than it was when the node read it."""

    def epsilon(self, node: Any) -> float | None:
        """The epsilon of a normalisation whose node does not tell."""


Build = Callable[[Any, "Operands"], "Formula | None"]
Table = Mapping[str, Build]
"""What builds the formula of a node, by the node's name."""


def formula(node: Any, source: Source, table: Table, depth: int = DEPTH) -> Formula | None:
    """The formula for the first output of `node`, by a table of operations; None if there is none."""
    build = table.get(node.name())
    if build is None or not depth or not source.is_fresh(node):
        return None
    return build(node, Operands(node, source, table, depth - 1))


class Operands:
    """Operands of one node, as formulas."""

    def __init__(self, node: Any, source: Source, table: Table, depth: int) -> None:
        self.node = node
        self.source = source
        self._table = table
        self._depth = depth

    def saved(self, name: str) -> Formula | None:
        """What the node saved under that name."""
        packed = self.source.packed(self.node, name)
        return None if packed is None else Formula(".", (packed,), _first)

    def input(self, k: int) -> Formula | None:
        """The k-th input: itself if it was saved, or made again."""
        inputs = self.node.next_functions
        node, output = inputs[k] if k < len(inputs) else (None, 0)
        if node is None:
            return None
        if node.name() == "torch::autograd::AccumulateGrad":
            packed = self.source.leaf(node.variable)
            return None if packed is None else Formula(".", (packed,), _first)
        packed = self.source.made_by(node, output)
        if packed is not None:
            return Formula(".", (packed,), _first)
        return formula(node, self.source, self._table, self._depth) if output == 0 else None

    def either(self, name: str, k: int) -> Formula | None:
        """What the node saved under that name, or else its k-th input."""
        return self.saved(name) or self.input(k)

    def join(self, run: Callable[..., Any], *operands: Formula | None) -> Formula | None:
        """The formula that applies `run` to the operands; None if one is missing."""
        found = [operand for operand in operands if operand is not None]
        if len(found) < len(operands):
            return None
        if all(operand.run is _first for operand in found):  # as most are; this is on the way of what is dropped
            name = f"{self.node.name()}({','.join('.' * len(found))})"
            return Formula(name, tuple(operand.inputs[0] for operand in found), lambda values: run(*values))
        cuts = [0]
        for operand in found:
            cuts.append(cuts[-1] + len(operand.inputs))

        def apply(values: Sequence[Tensor]) -> Any:
            return run(*(f.run(values[low:high]) for f, low, high in zip(found, cuts, cuts[1:], strict=False)))

        name = f"{self.node.name()}({','.join(operand.name for operand in found)})"
        return Formula(name, tuple(packed for operand in found for packed in operand.inputs), apply)


def _first(values: Sequence[Tensor]) -> Tensor:
    return values[0]
