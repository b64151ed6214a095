"""A thread's hooks on PyTorch's stack of saved-tensor hooks: on it, off it for a while, or off it for good."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

Hooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""What PyTorch calls when it saves a tensor, and when backward needs it."""

_autograd: Any = torch._C._autograd


class OnStack:
    """Hooks that one thread can switch on and off. PyTorch calls only the hooks on top of its stack.

    Attributes
    ----------
    hooks : Hooks
        The functions on the stack: methods of this object, or functions in C++ that name it as `__self__`.
    resting : bool
        Whether the hooks are off because they have nothing to do.
    bypassed : bool
        Whether the hooks are off within the present module; see `bypass`.
    paused : bool
        Whether they are off while a backward runs; see `pause`.
    """

    def __init__(self) -> None:
        self.hooks: Hooks = (self.pack, self.unpack)
        self.resting = self.bypassed = False
        self.paused = self._suspended = False

    def pack(self, tensor: Tensor) -> Any:
        """Handle a tensor that autograd saves."""
        raise NotImplementedError

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor that backward needs."""
        raise NotImplementedError

    def push(self) -> None:
        """Switch the hooks on for this thread."""
        _autograd._push_saved_tensors_default_hooks(*self.hooks)

    def take_off(self) -> bool:
        """Switch the hooks off unless somebody else's lie on top of them; return whether they are off."""
        if self.paused:
            self.paused = False  # nobody puts them back
            return True
        if not self.on_top():
            return False
        _autograd._pop_saved_tensors_default_hooks()
        return True

    def rest(self) -> bool:
        """Switch the hooks off until `push`; return whether they are off. Call it between two iterations only."""
        self.resting = self.resting or self.take_off()
        return self.resting

    def bypass(self, on: bool) -> None:
        """Switch the hooks off within a module, or on again after it, unless somebody else's are on the stack."""
        if on:
            self.bypassed = self.take_off()
        elif self.is_free():
            self.push()
            self.bypassed = False

    def pause(self) -> bool:
        """Switch the hooks off until `unpause`, if they are on and on top; return whether they were."""
        if self.paused or not self.on_top():
            return False
        self.paused = True  # first: an interrupt may come after each line; see `unpause_after_interrupt`
        _autograd._pop_saved_tensors_default_hooks()
        return True

    def unpause(self) -> None:
        """Switch the hooks on again, unless they were to be off in the meantime."""
        if self.paused:
            self.push()
            self.paused = False

    def unpause_after_interrupt(self) -> None:
        """Switch the hooks on again that an interrupt left paused. Call it while no backward runs."""
        if self.paused and not self.on_top():
            if not self.is_free():
                return  # they come back once somebody else's hooks are gone
            self.push()
        self.paused = False

    def suspend(self) -> None:
        """Switch the hooks off until `resume`; they must be on top."""
        _autograd._pop_saved_tensors_default_hooks()
        self._suspended = True

    def resume(self) -> None:
        """Switch the hooks on again if they were suspended."""
        if self._suspended:
            self._suspended = False
            self.push()

    def is_free(self) -> bool:
        """Return whether hooks may be pushed: on top of somebody's, they would be what his `with` block pops."""
        return bool(_autograd._saved_tensors_hooks_is_enabled()) and (
            _autograd._top_saved_tensors_default_hooks(True) is None
        )

    def on_top(self) -> bool:
        """Return whether these are the hooks that PyTorch would call now."""
        top = _autograd._top_saved_tensors_default_hooks(True)
        return top is not None and getattr(top[0], "__self__", None) is self
