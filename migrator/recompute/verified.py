"""What was seen to hold of replays: that one gave the bits of a saved tensor when it was tried, and what it took."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from torch_tiers.migrator.recompute.replays import operators_of

if TYPE_CHECKING:
    from torch_tiers.migrator.recompute.replays import Replay, Replays

SHAPES = 3  # for which the same operators have given the same bits at a site, after which others need not be tried

CHOSEN = re.compile("mm|mv|dot|conv|attention|rnn|lstm|gru|matmul|linear|linalg|fft|cudnn|miopen|mkldnn|::")
"""In the names of operators whose kernel a library chooses by the shape, or of which nothing is known."""

ATOMIC = re.compile(
    "index_(add|copy|put|reduce)|scatter|^put|max_unpool|cumsum|histc|bincount|kthvalue|median|embedding_bag|nll_loss2d"
)
"""In the names of those that write or add in any order on a GPU: small results may be the same twice by chance."""


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
        return None if found is None or self.took(found) is None else replays.joined(found)

    def took(self, replay: Replay, index: int = 0) -> Took | None:
        """What it takes to make one of a replay's tensors, if that held; None if it did not.

        Also if it held for several other shapes that do not matter: else nothing could be dropped where every iteration
        has shapes of its own. It takes the longest of those then.
        """
        name = replay.names[index]
        if name in self.held:
            return self.held[name]
        alike = [took for held, took in self.held.items() if operators_of(held) == operators_of(name)]
        if len(alike) < SHAPES or not are_alike_for_all_shapes(replay.operators):
            return None
        return max(alike)


def are_alike_for_all_shapes(operators: Iterable[str]) -> bool:
    """Whether operators that give the same bits twice for some shapes do for others: see `CHOSEN` and `ATOMIC`."""
    return not any(CHOSEN.search(name) or ATOMIC.search(name) for name in operators)


def base_of(tensor: Tensor) -> Tensor:
    """The tensor that owns the memory of `tensor`, a view of it or itself."""
    base = tensor._base
    return tensor if base is None else base


def layout(tensor: Tensor) -> tuple[Any, ...]:
    """What must be as it was when a replay was tried: strides and dtype; not how long contiguous dimensions are."""
    if tensor.is_contiguous():
        return (tensor.dim(), tensor.dtype)
    return (tensor.size(), tensor.stride(), tensor.dtype)
