"""A thread's place on PyTorch's stack of saved-tensor hooks: on it, for a while not, or not any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

Hooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""What PyTorch calls when it saves a tensor, and when backward needs it."""

_autograd: Any = torch._C._autograd


class OnStack:
    """Hooks that one thread can switch on and off. PyTorch calls those that lie on top of the stack, no others.

    Attributes
    ----------
    hooks : Hooks
        What lies on the stack: methods of this object or what stands in front of them, and names it as `__self__`.
    resting : bool
        They are off, as nothing is to be done with what is saved.
    bypassed : bool
        They are off for a moment, see `bypass`.
    """

    def __init__(self) -> None:
        self.hooks: Hooks = (self.pack, self.unpack)
        self.resting = self.bypassed = False
        self._suspended = False

    def pack(self, tensor: Tensor) -> Any:
        """PyTorch saves `tensor`."""
        raise NotImplementedError

    def unpack(self, packed: Any) -> Tensor:
        """Backward needs a tensor that `pack` was given."""
        raise NotImplementedError

    def push(self) -> None:
        """Switch the hooks on for this thread."""
        _autograd._push_saved_tensors_default_hooks(*self.hooks)

    def take_off(self) -> bool:
        """Switch them off, if nobody else's lie on top of them; whether they are off now."""
        if not self.on_top():
            return False
        _autograd._pop_saved_tensors_default_hooks()
        return True

    def rest(self) -> bool:
        """Switch them off, if nobody else's lie on top of them; whether they are. Between two iterations only."""
        self.resting = self.resting or self.take_off()
        return self.resting

    def bypass(self, on: bool) -> None:
        """Switch them off, or on again after that; not where somebody else's lie on the stack, until those are gone."""
        if on:
            self.bypassed = self.take_off()
        elif self.is_free():
            self.push()
            self.bypassed = False

    def suspend(self) -> None:
        """Switch them off until `resume`; they lie on top."""
        _autograd._pop_saved_tensors_default_hooks()
        self._suspended = True

    def resume(self) -> None:
        """Switch them on again if they were suspended."""
        if self._suspended:
            self._suspended = False
            self.push()

    def is_free(self) -> bool:
        """Whether hooks may be put there: on top of somebody's, they would be what his `with` block pops at its end."""
        return bool(_autograd._saved_tensors_hooks_is_enabled()) and (
            _autograd._top_saved_tensors_default_hooks(True) is None
        )

    def on_top(self) -> bool:
        """Whether these are the hooks that PyTorch would call now."""
        top = _autograd._top_saved_tensors_default_hooks(True)
        return top is not None and getattr(top[0], "__self__", None) is self
