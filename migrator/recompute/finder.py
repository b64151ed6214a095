"""Finds the formulas that make saved tensors, and knows of each what was seen to hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torch import Tensor

from torch_tiers.migrator.recompute.formulas import Formula, Pattern, search
from torch_tiers.migrator.recompute.operations import TABLE
from torch_tiers.migrator.recompute.ways import Way, follow, one_of

if TYPE_CHECKING:
    from torch_tiers.migrator.recompute.origins import Origins


Follow: TypeAlias = "Callable[[Way, Any, Origins], list[Any] | None]"


class Took(NamedTuple):
    """What it took to carry a formula out: seconds on the device, bytes in use besides what it makes, host seconds."""

    seconds: float
    scratch: int
    host: float = 0.0


_IN_PLACE = frozenset(
    f"{name}Backward0"
    for name in (
        *("Add", "Div", "Hardtanh", "LeakyRelu", "Mul", "Relu", "Sigmoid", "Silu", "Sub", "Tanh"),
        *("T", "Transpose"),
    )
)
"""Operations that a program may ask for in place, each of which adds one to the version of what it changes."""


class Verified(NamedTuple):
    """A formula that gave the same bits when it was tried, and for what.

    Attributes
    ----------
    held : mapping of str to Took
        What it took, by its name: of a convolution there is one for each of several shapes.
    epsilon : float or None
        What it took for a normalisation's epsilon.
    layout : tuple
        Of what it made.
    version : int
        Of what it made: how often that had been changed in place.
    searched : bool
        Whether it needs to know which saved tensor came from which node, or the versions of parameters.
    found : frozenset of str
        Sites of the saved tensors that it takes because of the node that made them.
    choices : object
        Of a product the kernels that the program had chosen by then, see `Origins`: others may give other bits.
    """

    held: Mapping[str, Took]
    epsilon: float | None
    layout: tuple[Any, ...]
    version: int
    searched: bool
    found: frozenset[str]
    choices: object = None

    def besides(self, before: Verified | None) -> Verified:
        """What is known now that this was seen, where `before` had been."""
        if before is None or before._replace(held={}, found=self.found) != self._replace(held={}):
            return self
        return self._replace(held={**before.held, **self.held}, found=before.found | self.found)


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
    return found[1] if found is not None and _is_as_made(base, found[1].name) else None


def _is_as_made(base: Tensor, name: str) -> bool:
    """Whether nobody can have changed in place what the formula of that name makes, but its own last operations.

    A mask that is put on under `no_grad` leaves no trace in the graph. What goes past the version counter, too, such as
    a change through `.data`, cannot be seen.
    """
    changes, rest = 0, name
    while (operation := rest.partition("("))[0] in _IN_PLACE:
        changes, rest = changes + 1, operation[2]
    return base._version <= changes


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
        What has been seen to hold; may be set anew.
    follow : callable
        `migrator.recompute.ways.follow`, or its twin.
    """

    def __init__(self, verified: Verified, follow: Follow = follow) -> None:
        self.verified = verified
        self._follow = follow
        self._pattern: Pattern | None = None

    def find(self, base: Tensor, source: Origins) -> Formula | None:
        """See `find`; None, too, if it is another formula or another layout than was verified."""
        # An addition may be in place or not, and what is not may be masked under `no_grad` later on.
        if layout(base) != self.verified.layout or base._version != self.verified.version:
            return None
        if self.verified.choices is not None and self.verified.choices is not source.choices:
            return None
        if (replays := source.replays) is not None:
            closure = replays.find(base)
            return closure[0] if closure is not None and closure[0].name in self.verified.held else None
        node = _maker(base)
        if node is None:
            return None
        pattern = self._pattern
        packs = None if pattern is None or pattern.way is None else self._follow(pattern.way, node, source)
        if pattern is not None and packs is not None:
            return pattern.of(packs) if _is_as_made(base, pattern.what.name) else None
        found = search(node, source, TABLE)
        if found is None or found[1].name not in self.verified.held or not _is_as_made(base, found[1].name):
            return None
        pattern, what = found
        self._pattern = pattern._replace(way=pattern.way and one_of(pattern.way))
        return what
