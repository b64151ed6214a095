"""The gradient of a log-softmax, written over the gradient that it is made of.

At its loss a language model needs most: every block's tensors are saved by then, and log-softmax's output, the
gradient of the loss and the one made of these two are float32, each as large as all logits. Nobody looks at the second
again once the third is there. PyTorch's kernels add up a row of it, and then write where they have just read, number
by number: with one memory for both they make the same bits.

They are PyTorch's own, called with their output given. What may be written over is told by counting references, as
PyTorch does where it adds up gradients in place. Who else has a gradient, its memory, or one of Python's objects for
these (a hook, another node that is still to run, a view, `torch.func`) raises one of four counts above what they are
of a gradient that nobody has; and what that is, is seen once in each process.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from allocator.sizes import MiB

NAME = "_log_softmax_backward_data"
NODE = "LogSoftmaxBackward0"
LEAST = MiB  # bytes of a gradient for which it is worth the microseconds of looking

Counts = tuple[int, ...]
Kernel = Callable[[Tensor, Tensor, int, torch.dtype], Tensor]

_into: Any = torch.ops.aten._log_softmax_backward_data.out
_registered: Any = None
_guard = threading.Lock()


def install() -> None:
    """Have backward do so on the devices whose tensors move; no more than once, and only where it is to train."""
    global _registered
    cuda = torch.cuda.is_initialized()
    if not cuda and torch.cuda.is_available():
        return  # it trains on the host, which has no tiers
    with _guard:
        if _registered is None and torch._C._len_torch_dispatch_stack() == 0 and _free() is not None:
            _registered = _register(_backward, "CUDA" if cuda else "CPU")


def uninstall() -> None:
    """Undo `install`."""
    global _registered
    with _guard:
        if _registered is not None:
            _registered._destroy()
            _registered = None


def _register(kernel: Kernel, key: str) -> Any:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():  # of taking the place of another
        warnings.simplefilter("ignore")
        library.impl(NAME, kernel, key)
    return library


def _backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    over = grad.nbytes >= LEAST and _belongs(grad, dtype) and _counts(grad) == _free()
    made: Tensor = _into(grad, output, dim, dtype, out=grad if over else _new(grad, dtype))
    return made


def _new(grad: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(grad.shape, dtype=dtype, device=grad.device)


def _belongs(grad: Tensor, dtype: torch.dtype) -> bool:
    """Whether this is autograd's own call, with nothing to differentiate later, and all of the memory is PyTorch's."""
    node: Any = torch._C._current_autograd_node()
    storage: Any = grad.untyped_storage()
    return (
        node is not None
        and node.name() == NODE
        and not torch.is_grad_enabled()
        and grad.dtype is dtype
        and grad.is_contiguous()
        and storage.nbytes() == grad.nbytes
        and storage.resizable()  # else of another library, which may have it still
    )


def _counts(grad: Tensor) -> Counts:
    """References to a gradient, to its memory, and to Python's objects for both."""
    storage: Any = grad.untyped_storage()
    uses = torch._C._storage_Use_Count(storage._cdata)
    return grad._use_count(), sys.getrefcount(grad), uses, sys.getrefcount(storage)  # type: ignore[attr-defined]


@cache
def _free() -> Counts | None:
    """Counts of a gradient that nobody else has; None if this PyTorch does not let others be seen by them."""
    seen: list[Counts] = []

    def look(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        seen.append(_counts(grad))
        made: Tensor = _into(grad, output, dim, dtype, out=_new(grad, dtype))
        return made

    held: list[object] = []
    hooks: tuple[Callable[[Tensor], None] | None, ...] = (
        None,
        held.append,
        lambda grad: held.append(grad.detach()),
        lambda grad: held.append(grad.untyped_storage()),
    )
    library = _register(look, "CPU")
    try:
        for hook in hooks:
            made = torch.log_softmax(torch.zeros(1, 2, dtype=torch.float32, device="cpu", requires_grad=True), 1)
            if hook is not None:
                made.register_hook(hook)
            (2 * made).sum().backward()
    except AttributeError:  # the counts are no part of what PyTorch promises
        return None
    finally:
        library._destroy()
    free, *others = seen
    return None if free in others else free
