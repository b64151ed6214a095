"""Where the formulas of one thread find their inputs: what nodes made is noted with them while it is saved."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

from torch_tiers.migrator.recompute.replays import Replays

_ORIGIN, _EPSILON = "tiers.origin", "tiers.epsilon"  # in a node's metadata, which lives and dies with the node

Versions: TypeAlias = Mapping[int, tuple[Callable[[], Any], int]]
_UNKNOWN: tuple[Callable[[], Any], int] = (lambda: None, -1)


class Origins:
    """Where the formulas of one thread find their inputs; see `migrator.recompute.ways.Source`.

    Parameters
    ----------
    unpack : callable
        The thread's own unpack hook.
    keep : callable
        Packs a tensor that stays.
    versions : mapping of int to (weak reference, int)
        The model's parameters by id, which others may have once they are gone, and what versions they had.
    asked : set of int
        Told of every parameter that is asked for.
    changed : set of int
        Told of every one that had another version by then.
    began : int
        PyTorch's number of the first node of that forward.
    choices : object
        The kernels that the program had chosen when that forward began: one object for all that are equal.
    epsilon : float, optional
        What normalisations take of which nobody tells.
    replays : Replays, optional
        What makes tensors again by the operators that made them; then nothing else is asked for.
    """

    def __init__(
        self,
        unpack: Callable[[Any], Tensor],
        keep: Callable[[Tensor], Any],
        versions: Versions,
        asked: set[int],
        changed: set[int],
        began: int,
        choices: object = None,
        epsilon: float | None = None,
        replays: Replays | None = None,
    ) -> None:
        self.replays = replays
        self._unpack = unpack
        self._keep = keep
        self._versions = versions
        self._asked = asked
        self._changed = changed
        self._began = began
        self.choices = choices
        self._epsilon = epsilon
        self.searched = False  # for what a node made
        self.found: set[str] = set()  # and the sites at which that was saved
        self.asked = False  # for an epsilon
        self.told: float | None = None  # what the answer was

    def is_fresh(self, node: Any) -> bool:
        """Whether a node was made in the forward that is under way."""
        return bool(node._sequence_nr() >= self._began)

    def packed(self, node: Any, name: str) -> Any:
        """What was packed of the tensor that `node` saved by that ``_raw_saved_`` name."""
        try:
            saved: Any = getattr(node, name, None)
            if saved is None:
                return None
            hook = saved.unpack_hook
            if hook is not None:
                return saved.data if hook == self._unpack else None
            data = saved.data
            if data is None:
                return None  # a number
            # Saved while the hooks were off. PyTorch alone knows which version it had then, and says so when asked.
            getattr(node, name.replace("_raw_saved_", "_saved_", 1))
            return self._keep(data)
        except RuntimeError:
            return None  # backward has released it, or somebody has changed it

    def made_by(self, node: Any, output: int) -> Any:
        """What was packed of that output of a node."""
        self.searched = True
        entry = node.metadata.get(_ORIGIN)
        if entry is None or entry[0] != output:
            return None
        _, ref, rest, key = entry
        found = ref()
        if found is None:
            return None
        self.found.add(key)
        return found if rest is None else (found, *rest)

    def leaf(self, tensor: Tensor) -> Any:
        """Pack a parameter that is as it was when the forward began."""
        self.searched = True
        self._asked.add(id(tensor))
        ref, version = self._versions.get(id(tensor), _UNKNOWN)
        if ref() is not tensor:
            return None
        if version == tensor._version:
            return self._keep(tensor)
        self._changed.add(id(tensor))
        return None

    def epsilon(self, node: Any) -> float | None:
        """The epsilon of a normalisation; None, too, where another one in the same formula has another."""
        self.asked = True
        known: float | None
        known, _ = node.metadata.get(_EPSILON, (self._epsilon, False))
        if self.told is not None and known != self.told:
            return None
        self.told = known
        return known


def note(tensor: Tensor, packed: Any, key: str) -> None:
    """Remember with the node that made `tensor` what was packed of it and at which site, without keeping it alive."""
    node: Any = tensor.grad_fn
    if node is not None:
        kept = type(packed) is tuple
        ref = weakref.ref(packed[0] if kept else packed)
        node.metadata[_ORIGIN] = (tensor.output_nr, ref, packed[1:] if kept else None, key)


def note_epsilon(module: Any, output: Any) -> None:
    """Remember with the node that made a normalisation's output what its module's epsilon is."""
    epsilon = vars(module).get("eps", getattr(type(module), "eps", None))  # in a model all modules are asked
    if isinstance(epsilon, float) and isinstance(output, Tensor):
        node: Any = output.grad_fn
        if node is not None and node.name() == "BackwardHookFunctionBackward":
            node = node.next_functions[output.output_nr][0]  # a full backward hook stands before what forward gave
        if node is not None:
            # The innermost module speaks first: one around it may hand out what it has made.
            node.metadata.setdefault(_EPSILON, (epsilon, isinstance(module, (nn.LayerNorm, nn.RMSNorm))))


def tells_epsilon(node: Any) -> bool:
    """Whether it is known of this node, in this step: by a normalisation itself, not by whoever calls one."""
    return bool(node.metadata.get(_EPSILON, (None, False))[1])
