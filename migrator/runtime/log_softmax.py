"""The gradient of a log-softmax, written over the gradient that it is made of.

At its loss a language model needs most: every block's tensors are saved by then, and log-softmax's output, the
gradient of the loss and the one made of these two are float32, each as large as all logits. Nobody looks at the second
again once the third is there. PyTorch's kernels add up a row of it, and then write where they have just read, number
by number: with one memory for both they make the same bits.

They are PyTorch's own, called with their output given. What may be written over is told by counting references, as
PyTorch does where it adds up gradients in place. Who else has a gradient, its memory, or one of Python's objects for
these (a hook, another node that is still to run, a view, `torch.func`) raises one of four counts above what they are
of a gradient that nobody has. What that is, is seen once in each process, when a backward first asks, with gradients of
a few bytes: on the host and in a thread of its own, where nothing of the program's is on, and nothing waits for it.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from allocator.sizes import MiB

NAME = "_log_softmax_backward_data"
NODE = "LogSoftmaxBackward0"
LEAST = MiB  # bytes of a gradient for which it is worth the microseconds of looking
HALF_TO_FLOAT = (torch.float32, torch.float16)  # of a gradient and an input: what is made has the input's type
TRIES = 3  # to see what counts are; each may come at a time at which nothing can be seen

Counts = tuple[int, ...]

_operation: Any = torch.ops.aten._log_softmax_backward_data
_registered: dict[str, Any] = {}  # by dispatch key; for good, as other threads may be calling it
_kind = ""  # of the devices on which it is on
_free: Counts | None = None  # the counts of a gradient that nobody else has
_tries = 0


class _OfThread(threading.local):
    seen: list[Counts] | None = None  # while it looks at gradients of its own


_present = _OfThread()


def install() -> None:
    """Have backward do so on the devices whose tensors move. Only where it is to train, and as often as one likes."""
    global _kind
    cuda = torch.cuda.is_initialized()
    if cuda or not torch.cuda.is_available():  # else it trains on the host, which has no tiers
        _register("CPU")
        if cuda:
            _register("CUDA")
        _kind = "cuda" if cuda else "cpu"


def uninstall() -> None:
    """Undo `install`."""
    global _kind
    _kind = ""


def _register(key: str) -> None:
    others = getattr(torch.library, "_impls", ())
    if key in _registered or f"aten/{NAME}/{key}" in others:  # who has put a kernel there wants it to run
        return
    library = _registered[key] = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():  # of taking the place of another
        warnings.simplefilter("ignore")
        library.impl(NAME, _backward, key)


def _backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    with torch._C.DisableTorchFunction():  # autograd's own kernel calls none
        if _may_write_over(grad, dtype):
            # Another tensor: neither attributes of one, nor its history, nor weak references to it are the other's.
            made = torch.empty(0, dtype=grad.dtype, device=grad.device)
            made.set_(grad.untyped_storage(), 0, grad.shape, grad.stride())
        else:
            kind = dtype if (grad.dtype, dtype) == HALF_TO_FLOAT else grad.dtype
            made = torch.empty(grad.shape, dtype=kind, device=grad.device)
        _operation.out(grad, output, dim, dtype, out=made)
    return made


def _may_write_over(grad: Tensor, dtype: torch.dtype) -> bool:
    """Whether nobody has the gradient any more."""
    if _present.seen is not None:
        _present.seen.append(_counts(grad))
        return False
    if grad.device.type != _kind or grad.nbytes < LEAST or not _belongs(grad, dtype):
        return False
    free = _free_counts()
    return free is not None and _counts(grad) == free


def _belongs(grad: Tensor, dtype: torch.dtype) -> bool:
    """Whether this is autograd's own call, with nothing to differentiate later, and all of the memory PyTorch's."""
    node: Any = torch._C._current_autograd_node()
    storage: Any = grad.untyped_storage()
    return (
        node is not None
        and node.name() == NODE
        and not torch.is_grad_enabled()
        and grad.dtype is dtype
        and grad.stride() == torch.empty(grad.shape, device="meta").stride()
        and storage.nbytes() == grad.nbytes
        and storage.resizable()  # else of another library, which may have it still
        and (grad.is_cuda or not storage.is_shared())  # with another process
        and weakref.getweakrefcount(storage) == 0
    )


def _counts(grad: Tensor) -> Counts:
    """References to a gradient, to its memory, and to Python's objects for both."""
    storage: Any = grad.untyped_storage()
    uses = torch._C._storage_Use_Count(storage._cdata)
    return grad._use_count(), sys.getrefcount(grad), uses, sys.getrefcount(storage)  # type: ignore[attr-defined]


def _free_counts() -> Counts | None:
    """Counts of a gradient that nobody else has; None if it could not be seen what they are."""
    global _free, _tries
    if _free is None and _tries < TRIES:
        _tries += 1
        looking = threading.Thread(target=_look, name="tiers-counts")
        looking.start()
        looking.join()
    return _free


def _look() -> None:
    """See what the counts are in backwards of this thread, and whether they tell who else has a gradient."""
    global _free
    if sys.gettrace() is not None or sys.getprofile() is not None:  # which may have references of their own
        return
    held: list[object] = []
    hooks: tuple[Callable[[Tensor], None], ...] = (
        lambda grad: None,
        held.append,
        lambda grad: held.append(grad.detach()),
        lambda grad: held.append(grad.untyped_storage()),
    )
    seen = _present.seen = []
    try:
        for hook in hooks:
            x = torch.zeros(1, 2, dtype=torch.float32, device="cpu", requires_grad=True)
            made = torch.log_softmax(x, 1)
            made.register_hook(hook)
            (2 * made).sum().backward()
    except (AttributeError, RuntimeError):  # the counts are no part of what PyTorch promises
        return
    free, *others = seen
    if len(others) == len(hooks) - 1 and free not in others:
        _free = free
