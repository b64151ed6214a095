"""Verified recomputations: replays that gave the bits of a saved tensor in a trial, and their costs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from torch_tiers.migrator.recompute.replays import operators_of

if TYPE_CHECKING:
    from torch_tiers.migrator.recompute.replays import Replay, Replays

SHAPES = 3  # for which the same operators have given the same bits at a site, after which others need not be tried

MOST = 1024  # shapes that are remembered of a site: a program may have new ones in every iteration

CHOSEN = re.compile("mm|mv|dot|conv|attention|rnn|lstm|gru|matmul|linear|linalg|fft|cudnn|miopen|mkldnn|::")
"""In the names of operators whose kernel a library chooses by the shape, or of which nothing is known."""

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
"""cuBLAS chooses their kernel, too, but promises the same bits at every run of one shape where each stream has its own
workspace, which PyTorch gives it (cuBLAS manual, "Results Reproducibility"). On a CPU nobody promises that."""

ATTENTIONS = frozenset(f"_scaled_dot_product_{by}_attention" for by in ("flash", "efficient", "cudnn"))
"""FlashAttention documents a deterministic forward. Among cuDNN's exceptions are backwards alone. Of the efficient
kernel nobody says so. `tests/gpu/test_repeated_bits.py` tries all three."""

ATOMIC = re.compile(
    "index_(add|copy|put|reduce)|scatter|^put|max_unpool|cumsum|histc|bincount|kthvalue|median|embedding_bag|nll_loss2d"
)
"""In the names of those that write or add in any order on a GPU: small results may be the same twice by chance."""


class Took(NamedTuple):
    """The cost of a replay: seconds on the device, bytes in use besides its results, seconds of the host."""

    seconds: float
    scratch: int
    host: float = 0.0


class Verified(NamedTuple):
    """Replays that gave the same bits at a site, and the conditions for that.

    Attributes
    ----------
    held : mapping of str to Took
        The cost of each, by name: a convolution has one for each of several shapes.
    layout : tuple
        The layout of their result; of the last that were verified.
    version : int
        How often their result had been changed in place.
    found : frozenset of str
        Sites of the saved tensors that they begin with.
    choices : object
        The program's kernel choices then: others may give other bits.
    """

    held: Mapping[str, Took]
    layout: tuple[Any, ...]
    version: int
    found: frozenset[str]
    choices: object = None

    @property
    def conditions(self) -> tuple[int, object]:
        """Return under what all that held did so."""
        return self.version, self.choices

    def besides(self, before: Verified | None) -> Verified:
        """Return this, merged with what was verified `before` under the same conditions."""
        if before is None or before.conditions != self.conditions:
            return self
        held = {**before.held, **self.held}
        held = dict(list(held.items())[-MOST:]) if len(held) > MOST else held
        return self._replace(held=held, found=before.found | self.found)

    def find(self, base: Tensor, replays: Replays) -> tuple[Replay, int] | None:
        """Return the replay of a tensor and the index of its result, if the conditions still hold.

        Returns None if they do not, or if there is no replay.
        """
        if not self._holds_for(base, replays):
            return None
        found = replays.find(base)
        if found is None or (found.names[0] not in self.held and self.took(found, 0, base) is None):
            return None
        return replays.joined(found)

    def untried(self, base: Tensor, replays: Replays) -> Replay | None:
        """Return the replay of a tensor that has another shape than all that were tried; None if there is none."""
        found = replays.find(base) if self._holds_for(base, replays) else None
        return None if found is None or self.took(found, 0, base) is not None else found

    def _holds_for(self, base: Tensor, replays: Replays) -> bool:
        return base._version == self.version and replays.choices is self.choices

    def took(self, replay: Replay, index: int, base: Tensor) -> Took | None:
        """Return the cost of one result of a replay, if that was verified; else None.

        It counts as verified, too, if it was for several other shapes and shapes do not matter: otherwise nothing could
        be dropped if every iteration has new shapes. The cost is then the largest of those.
        """
        name = replay.names[index]
        if name in self.held:
            return self.held[name]
        if layout(base) != self.layout or not are_alike_for_all_shapes(replay.operators, on_gpu=base.is_cuda):
            return None
        alike = [took for held, took in self.held.items() if operators_of(held) == operators_of(name)]
        return Took(*map(max, zip(*alike, strict=True))) if len(alike) >= SHAPES else None


def add(to: dict[str, Verified], new: Mapping[str, Verified]) -> None:
    """Add what was verified by now, by site."""
    for key, verified in new.items():
        to[key] = verified.besides(to.get(key))


def are_alike_for_all_shapes(operators: Iterable[str], *, on_gpu: bool) -> bool:
    """Return whether operators that repeat their bits for some shapes do for others.

    See `CHOSEN`, `PRODUCTS`, `ATTENTIONS` and `ATOMIC`.
    """
    others = (name for name in operators if not (on_gpu and name in PRODUCTS | ATTENTIONS))
    return not any(CHOSEN.search(name) or ATOMIC.search(name) for name in others)


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor that owns the memory of `tensor`, which is a view of it or itself."""
    base = tensor._base
    return tensor if base is None else base


def layout(tensor: Tensor) -> tuple[Any, ...]:
    """Return the parts of a layout that must be as in the trial: dtype, and dimensions in the order of their strides.

    Sizes are among them only where elements do not lie one after the other: in every iteration they may be others.
    """
    if tensor.is_contiguous():
        return (tensor.dim(), tensor.dtype)
    size, stride = tensor.size(), tensor.stride()
    order = sorted((k for k in range(len(size)) if size[k] != 1), key=stride.__getitem__, reverse=True)
    dense = 1
    for k in reversed(order):
        if stride[k] != dense:
            return (size, stride, tensor.dtype)
        dense *= size[k]
    return (tensor.dim(), tensor.dtype, tuple(order))
