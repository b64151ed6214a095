"""What was seen to hold of replays: that one gave the bits of a saved tensor when it was tried, and what it took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from torch_tiers.migrator.recompute.replays import Replay, Replays


class Took(NamedTuple):
    """What a replay took: seconds on the device, bytes in use besides what it makes, seconds of the host."""

    seconds: float
    scratch: int
    host: float = 0.0


class Verified(NamedTuple):
    """Replays that gave the same bits at a site, and for what.

    Attributes
    ----------
    held : mapping of str to Took
        What each took, by its name: of a convolution there is one for each of several shapes.
    layout : tuple
        Of what they made.
    version : int
        Of what they made: how often that had been changed in place.
    found : frozenset of str
        Sites of the saved tensors that they begin with.
    choices : object
        The kernels that the program had chosen by then: others may give other bits.
    """

    held: Mapping[str, Took]
    layout: tuple[Any, ...]
    version: int
    found: frozenset[str]
    choices: object = None

    def besides(self, before: Verified | None) -> Verified:
        """What is known now that this was seen, where `before` had been."""
        if before is None or before._replace(held={}, found=self.found) != self._replace(held={}):
            return self
        return self._replace(held={**before.held, **self.held}, found=before.found | self.found)

    def find(self, base: Tensor, replays: Replays) -> tuple[Replay, int] | None:
        """What makes a tensor again, and which of what that makes it is, if it is as it was when that held.

        None if it is not, or if there is nothing.
        """
        if layout(base) != self.layout or base._version != self.version or replays.choices is not self.choices:
            return None
        found = replays.find(base)
        return replays.joined(found) if found is not None and found.names[0] in self.held else None


def base_of(tensor: Tensor) -> Tensor:
    """The tensor that owns the memory of `tensor`, a view of it or itself."""
    base = tensor._base
    return tensor if base is None else base


def layout(tensor: Tensor) -> tuple[Any, ...]:
    """What must be as it was when a replay was tried: strides and dtype; not how long contiguous dimensions are."""
    if tensor.is_contiguous():
        return (tensor.dim(), tensor.dtype)
    return (tensor.size(), tensor.stride(), tensor.dtype)
