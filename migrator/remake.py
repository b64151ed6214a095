"""Light recomputation: saved tensors that are dropped, and made again when backward asks for them.

The graph holds a `Dropped` in place of such a tensor. It refers to a `Made`, shared by the tensors on one storage,
and that to the packed inputs of a formula: those that moved are fetched first, those that were dropped are made first.
So what is needed to make a tensor again lives as long as the tensor is part of the graph, whatever backward has
released meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from migrator.formulas import Formula, Pattern, search
from migrator.operations import TABLE
from migrator.tensors import view

if TYPE_CHECKING:
    from migrator.actions import Make
    from migrator.engine import Engine
    from migrator.origins import Origins
    from migrator.recorder import Record

Peek = Callable[[Any], Tensor]
"""Hands a packed tensor out without counting that as a use."""

_is_autocast = torch._C._is_any_autocast_enabled


MODIFIED = "modified by an inplace operation"  # what PyTorch says, and we do, of what was changed since it was saved
FOR_MAKING = (
    "It is what a tensor is made from that tiers dropped to save memory. If the program is to change it between "
    "forward and backward, choose a policy that makes nothing again, such as TIERS_POLICY=flashneuron."
)


class Verified(NamedTuple):
    """A formula that gave the same bits when it was tried, and for what.

    Attributes
    ----------
    held : mapping of str to float
        The seconds that it took on the device, by its name: of a convolution there is one for each of several shapes.
    epsilon : float or None
        What it took for a normalisation's epsilon.
    layout : tuple
        Of what it made.
    searched : bool
        Whether it needs to know which saved tensor came from which node, or the versions of parameters.
    found : frozenset of str
        Sites of the saved tensors that it takes because of the node that made them.
    """

    held: Mapping[str, float]
    epsilon: float | None
    layout: tuple[Any, ...]
    searched: bool
    found: frozenset[str]

    def besides(self, before: Verified | None) -> Verified:
        """What is known now that this was seen, where `before` had been."""
        if before is None or before._replace(held={}, found=self.found) != self._replace(held={}):
            return self
        return self._replace(held={**before.held, **self.held}, found=before.found | self.found)


class Made:
    """The memory of dropped tensors that share a storage, while it is there."""

    __slots__ = ("__weakref__", "alias", "engine", "formula", "nbytes", "tensor", "unused", "version")

    def __init__(self, base: Tensor, formula: Formula, engine: Engine) -> None:
        alias = base.detach()  # shares the version counter, and lives on without memory
        self.version = alias._version
        self.nbytes = base.nbytes  # all of its storage
        alias.data = engine.empty(base.dtype)
        self.alias = alias
        self.formula = formula
        self.engine = engine
        self.unused = 0  # dropped tensors on it that backward has not asked for yet
        self.tensor: Tensor | None = None

    def make(self, peek: Peek) -> Tensor:
        """All of it, as one tensor; made if need be, and kept until the last one on it is used for the first time."""
        tensor = self.tensor
        if tensor is None:
            tensor = self.alias.detach()  # a change in place is noticed there
            try:
                tensor.data = run(self.formula, peek)
            except RuntimeError as error:
                # Perhaps it is a bias, which plain PyTorch would not have missed: the reader has to be told.
                if MODIFIED not in str(error) or FOR_MAKING in str(error):
                    raise
                raise RuntimeError(f"{error} {FOR_MAKING}") from None
            if self.unused:  # or else it is asked for again (retain_graph), and nobody can say how often
                self.tensor = tensor
                self.engine.entered(self.nbytes)
        return tensor

    def used(self) -> None:
        """One more of the tensors on it was asked for, for the first time."""
        self.unused -= 1
        if not self.unused and self.tensor is not None:
            self.tensor = None
            self.engine.left(self.nbytes)


class Dropped:
    """What the graph holds in place of a saved tensor that is made again."""

    __slots__ = ("__weakref__", "dtype", "first", "go", "made", "record", "size", "stride", "was_used")

    def __init__(self, tensor: Tensor, made: Made, go: Make, record: Record | None) -> None:
        made.unused += 1
        self.go = go
        self.made = made
        self.record = record
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.first = int(tensor.storage_offset())
        self.was_used = False

    def changed(self) -> bool:
        """Whether what was saved has been changed in place since."""
        return self.made.alias._version != self.made.version

    def again(self, peek: Peek, *, count: bool) -> Tensor:
        """The tensor, bit for bit; with `count` it has been asked for."""
        made = self.made
        tensor = made.make(peek)
        if count and not self.was_used:
            self.was_used = True
            made.used()
        if (
            tensor.stride() == self.stride
            and tensor.size() == self.size
            and tensor.storage_offset() == self.first
            and tensor.dtype is self.dtype
        ):
            return tensor  # as most are
        return view(made.alias, tensor.untyped_storage(), self.dtype, self.first, self.size, self.stride)


def run(what: Formula, peek: Peek) -> Tensor:
    """Make a tensor by its formula.

    Nodes save what an operation was really given: below autocast, which has cast its arguments already.
    """
    values = [peek(packed) for packed in what.inputs]
    if not torch.is_grad_enabled() and not _is_autocast():  # as in most backwards; to switch them off takes longer
        return what.run(values)
    with torch.no_grad(), torch._C._DisableAutocast():
        return what.run(values)


def base_of(tensor: Tensor) -> Tensor:
    """The tensor that owns the memory of `tensor`, a view of it or itself."""
    base = tensor._base
    return tensor if base is None else base


def layout(tensor: Tensor) -> tuple[Any, ...]:
    """What must be as it was when a formula was tried: strides and dtype; not how long contiguous dimensions are."""
    if tensor.is_contiguous():
        return (tensor.dim(), tensor.dtype)
    return (tensor.size(), tensor.stride(), tensor.dtype)


def find(base: Tensor, source: Origins) -> Formula | None:
    """The formula for a plain tensor that owns its memory, all of it; None if there is none."""
    node = _maker(base)
    found = None if node is None else search(node, source, TABLE)
    return None if found is None else found[1]


def _maker(base: Tensor) -> Any:
    """The node whose first output is all of the memory of `base`; None if there is none."""
    node = base.grad_fn
    if node is None or base.output_nr or base.storage_offset():
        return None
    return node if base.nbytes == base.untyped_storage().nbytes() else None


class Finder:
    """Finds the formula of a site that was verified, in every period; all of it is searched for only once.

    Parameters
    ----------
    verified : Verified
        What has been seen to hold.
    """

    def __init__(self, verified: Verified) -> None:
        self._verified = verified
        self._pattern: Pattern | None = None

    def find(self, base: Tensor, source: Origins) -> Formula | None:
        """See `find`; None, too, if it is another formula or another layout than was verified."""
        if layout(base) != self._verified.layout:
            return None
        node = _maker(base)
        if node is None:
            return None
        what = None if self._pattern is None else self._pattern.follow(node, source)
        if what is not None:
            return what
        found = search(node, source, TABLE)
        if found is None or found[1].name not in self._verified.held:
            return None
        self._pattern, what = found
        return what
