"""Programs in which somebody has, or has seen, the gradient that log-softmax's backward is given.

Each returns gradients, and whatever else of them it has kept.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, multiprocessing
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

ROWS, CLASSES = 256, 1024  # 1 MiB
TARGETS = torch.arange(ROWS)


def logits(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(3)
    return torch.randn(shape or (ROWS, CLASSES)).to(dtype).requires_grad_()


def _retained() -> list[Tensor]:
    out = F.log_softmax(x := logits(), 1)
    out.retain_grad()
    F.nll_loss(out, TARGETS).backward()
    return [x.grad, out.grad]  # type: ignore[list-item]


def _asked_for() -> list[Tensor]:
    out = F.log_softmax(x := logits(), 1)
    return list(torch.autograd.grad(F.nll_loss(out, TARGETS), [x, out]))


def _given() -> list[Tensor]:
    grad = torch.ones(ROWS, CLASSES)
    F.log_softmax(x := logits(), 1).backward(grad)
    return [x.grad, grad]  # type: ignore[list-item]


def _given_in_numpy() -> list[Tensor]:
    class Foreign(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return torch.from_numpy(numbers)

    numbers = np.ones((ROWS, CLASSES), np.float32)
    Foreign.apply(F.log_softmax(x := logits(), 1)).backward()
    return [x.grad, torch.from_numpy(numbers)]  # type: ignore[list-item]


def _broadcast() -> list[Tensor]:
    F.log_softmax(x := logits(), 1).sum().backward()
    return [x.grad]  # type: ignore[list-item]


def _beside(other_first: bool) -> Callable[[], list[Tensor]]:
    def run() -> list[Tensor]:
        out, leaf = F.log_softmax(x := logits(), 1), torch.zeros(ROWS, CLASSES, requires_grad=True)
        F.nll_loss(leaf + out if other_first else out + leaf, TARGETS).backward()
        return [x.grad, leaf.grad]  # type: ignore[list-item]

    return run


def _beside_a_view() -> list[Tensor]:
    """Autograd gives the leaf the gradient itself, seen as of another shape."""
    out, leaf = F.log_softmax(x := logits(), 1), torch.zeros(ROWS * CLASSES, requires_grad=True)
    F.nll_loss(out + leaf.view(ROWS, CLASSES), TARGETS).backward()
    return [x.grad, leaf.grad]  # type: ignore[list-item]


def _two_of_them() -> list[Tensor]:
    x, y = logits(), (logits() * 2).detach().requires_grad_()
    F.nll_loss(F.log_softmax(x, 1) + F.log_softmax(y, 1), TARGETS).backward()
    return [x.grad, y.grad]  # type: ignore[list-item]


def _later_node() -> list[Tensor]:
    x, y = logits(), logits()
    mid = y * 1  # whose node runs after log-softmax's, with the same gradient
    F.nll_loss(F.log_softmax(x, 1) + mid, TARGETS).backward()
    return [x.grad, y.grad]  # type: ignore[list-item]


def _twice() -> list[Tensor]:
    loss = F.nll_loss(F.log_softmax(x := logits(), 1), TARGETS)
    loss.backward(retain_graph=True)
    loss.backward()
    return [x.grad]  # type: ignore[list-item]


def _differentiated() -> list[Tensor]:
    loss = F.nll_loss(F.log_softmax(x := logits(), 1), TARGETS)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    grad.square().sum().backward()
    return [x.grad, grad.detach()]  # type: ignore[list-item]


def _node_hooks() -> list[Tensor]:
    kept: list[Tensor] = []
    out = F.log_softmax(x := logits(), 1)
    assert out.grad_fn is not None
    out.grad_fn.register_prehook(lambda grads: kept.extend(grads))
    out.grad_fn.register_hook(lambda _, grads: kept.extend(grads))
    F.nll_loss(out, TARGETS).backward()
    return [x.grad, *kept]  # type: ignore[list-item]


def _unwrapped(tensor: Tensor) -> Tensor:
    functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
    return functorch.get_unwrapped(tensor) if functorch.is_functorch_wrapped_tensor(tensor) else tensor


def _functional() -> list[Tensor]:
    kept: list[Tensor] = []

    def loss(x: Tensor) -> Tensor:
        out = F.log_softmax(x, 1)
        out.register_hook(kept.append)
        return F.nll_loss(out, TARGETS)

    with torch.no_grad():
        made = torch.func.grad(loss)(logits().detach())
    return [made, *map(_unwrapped, kept)]


def _batched() -> list[Tensor]:
    out = F.log_softmax(x := logits(), 1)
    grads = torch.ones(3, ROWS, CLASSES)
    return [*torch.autograd.grad(out, x, grads, is_grads_batched=True), grads]


def _dual() -> list[Tensor]:
    with torch.autograd.forward_ad.dual_level():
        x = logits()
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        (grad,) = torch.autograd.grad(F.nll_loss(F.log_softmax(dual, 1), TARGETS), dual)
        made = torch.autograd.forward_ad.unpack_dual(grad)
        return [made.primal] if made.tangent is None else [made.primal, made.tangent]


def _forward_over_reverse() -> list[Tensor]:
    def loss(x: Tensor) -> Tensor:
        return F.nll_loss(F.log_softmax(x, 1), TARGETS)

    x = logits().detach()
    with torch.no_grad():
        return [*torch.func.jvp(torch.func.grad(loss), (x,), (torch.ones_like(x),))]


class _Keeps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_log_softmax_backward" in str(func):
            self.kept.append(args[0])
        return func(*args, **(kwargs or {}))


def _watched() -> list[Tensor]:
    with _Keeps() as mode:
        F.nll_loss(F.log_softmax(x := logits(), 1), TARGETS).backward()
    return [x.grad, *mode.kept]  # type: ignore[list-item]


class _Wrapped(torch.Tensor):
    """A subclass around a tensor, as DTensor is."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> _Wrapped:
        made: _Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        bare = [arg.inner if isinstance(arg, _Wrapped) else arg for arg in args]
        made = func(*bare, **(kwargs or {}))
        return cls(made) if isinstance(made, Tensor) else made


def _wrapped() -> list[Tensor]:
    kept: list[Any] = []
    x = _Wrapped(logits().detach()).requires_grad_()
    out = F.log_softmax(x, 1)
    out.register_hook(kept.append)
    F.nll_loss(out, TARGETS).backward()
    return [x.grad.inner, kept[0].inner]  # type: ignore[union-attr]


def _called_by_hand() -> list[Tensor]:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            out = torch.log_softmax(x, 1)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            kept.extend(grads)
            return torch.ops.aten._log_softmax_backward_data(grads[0], ctx.saved_tensors[0], 1, torch.float32)

    kept: list[Tensor] = []
    F.nll_loss(Own.apply(x := logits()), TARGETS).backward()
    return [x.grad, *kept]  # type: ignore[list-item]


def _differentiable_gradient() -> list[Tensor]:
    out, w = F.log_softmax(x := logits(), 1), torch.ones(ROWS, CLASSES, requires_grad=True)

    def weigh(grad: Tensor) -> Tensor:
        with torch.enable_grad():
            return grad * w

    out.register_hook(weigh)
    (grad,) = torch.autograd.grad(F.nll_loss(out, TARGETS), x)
    ((grad * x).sum() + 0 * w.sum()).backward()
    return [x.grad, w.grad]  # type: ignore[list-item]


def _inference_gradient() -> list[Tensor]:
    class Foreign(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            with torch.inference_mode():
                return grads[0] * 2

    mid = (x := logits()) * 1
    mid.register_hook(lambda grad: grad.mul_(2))
    F.nll_loss(Foreign.apply(F.log_softmax(mid, 1)), TARGETS).backward()
    return [x.grad]  # type: ignore[list-item]


class _Marked(torch.Tensor):
    """Nothing may be done with it in Python."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(func)


def _marked() -> list[Tensor]:
    found: list[bool] = []
    mid = (x := logits()) * 1
    out = F.log_softmax(mid, 1)
    out.register_hook(lambda grad: setattr(grad, "mark", 5))
    mid.register_hook(lambda grad: found.append(hasattr(grad, "mark")))
    F.nll_loss(out, TARGETS).backward()
    return [x.grad, torch.tensor(found)]  # type: ignore[list-item]


def _of_another_class() -> list[Tensor]:
    found: list[bool] = []
    mid = (x := logits()) * 1
    out = F.log_softmax(mid, 1)
    out.register_hook(lambda grad: grad.as_subclass(_Marked))
    mid.register_hook(lambda grad: found.append(type(grad) is Tensor))
    F.nll_loss(out, TARGETS).backward()
    return [x.grad, torch.tensor(found)]  # type: ignore[list-item]


def _half_of_a_tensor() -> list[Tensor]:
    out = F.log_softmax(x := logits(), 1)
    out.register_hook(lambda grad: torch.cat([grad, grad])[ROWS:])
    F.nll_loss(out, TARGETS).backward()
    assert x.grad is not None
    return [x.grad, torch.tensor(x.grad.untyped_storage().nbytes())]


def _weakly_held() -> list[Tensor]:
    refs: list[Any] = []
    out = F.log_softmax(x := logits(), 1)
    out.register_hook(lambda grad: refs.append(weakref.ref(grad)))
    out.register_hook(lambda grad: refs.append(weakref.ref(grad.untyped_storage())))
    F.nll_loss(out, TARGETS).backward()
    return [x.grad, torch.tensor([ref() is None for ref in refs])]  # type: ignore[list-item]


def _strides() -> list[Tensor]:
    found: list[tuple[int, ...]] = []
    mid = logits(ROWS, CLASSES, 1, 1) * 1
    mid.register_hook(lambda grad: found.append(grad.stride()))
    out = F.log_softmax(mid, 1)
    (out * torch.ones_like(out).to(memory_format=torch.channels_last)).sum().backward()
    return [torch.tensor(found)]


def _of_two_processes() -> list[Tensor]:
    shared: list[Tensor] = []

    def share(grad: Tensor) -> None:
        grad.share_memory_()
        name, size = grad.untyped_storage()._share_filename_cpu_()[1:]  # what another process opens it by
        again = torch.UntypedStorage._new_shared_filename_cpu(b"", name, size)
        shared.append(torch.empty(0).set_(again, 0, grad.shape))  # type: ignore[arg-type]

    sharing = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")
    try:
        out = F.log_softmax(x := logits(), 1)
        out.register_hook(share)
        F.nll_loss(out, TARGETS).backward()
    finally:
        multiprocessing.set_sharing_strategy(sharing)
    return [x.grad, *shared]  # type: ignore[list-item]


def _compiled() -> list[Tensor]:
    """Dynamo has another way to call Python while it is on."""
    held: list[Tensor] = []

    def loss(x: Tensor) -> Tensor:
        return F.nll_loss(F.log_softmax(x, 1), torch.zeros(len(x), dtype=torch.long))

    grads = []
    compiled = torch.compile(loss, backend="aot_eager")
    for rows in (ROWS, ROWS, ROWS + 44):
        compiled(x := logits(rows, CLASSES)).backward()
        grads.append(x.grad)
    out = F.log_softmax(x := logits(), 1)
    out.register_hook(lambda grad: held.extend([grad, grad]))
    F.nll_loss(out, TARGETS).backward()
    return [*grads, x.grad, *held]  # type: ignore[list-item]


def _checkpointed() -> list[Tensor]:
    checkpoint(lambda x: F.cross_entropy(x, TARGETS), x := logits(), use_reentrant=True).backward()
    checkpoint(lambda x: F.cross_entropy(x, TARGETS), x, use_reentrant=False).backward()
    return [x.grad]  # type: ignore[list-item]


def _anomaly() -> list[Tensor]:
    with torch.autograd.detect_anomaly(check_nan=True), warnings.catch_warnings():
        F.cross_entropy(x := logits(), TARGETS).backward()
    return [x.grad]  # type: ignore[list-item]


PROGRAMS = {
    "retained": _retained,
    "asked for": _asked_for,
    "given": _given,
    "given in numpy": _given_in_numpy,
    "broadcast": _broadcast,
    "beside a leaf": _beside(other_first=False),
    "beside a leaf before it": _beside(other_first=True),
    "beside a view": _beside_a_view,
    "two of them": _two_of_them,
    "a later node": _later_node,
    "twice": _twice,
    "differentiated": _differentiated,
    "hooks of the node": _node_hooks,
    "torch.func": _functional,
    "batched": _batched,
    "forward over reverse": _forward_over_reverse,
    "dual numbers": _dual,
    "watched by a mode": _watched,
    "a subclass": _wrapped,
    "called by hand": _called_by_hand,
    "a gradient to be differentiated": _differentiable_gradient,
    "a gradient made in inference mode": _inference_gradient,
    "a gradient with attributes": _marked,
    "a gradient of another class": _of_another_class,
    "half of a tensor": _half_of_a_tensor,
    "held weakly": _weakly_held,
    "strides of one": _strides,
    "of two processes": _of_two_processes,
    "compiled": _compiled,
    "checkpointed": _checkpointed,
    "anomaly mode": _anomaly,
}
