"""Log-softmax's backward writes over its gradient where nobody else has that, and nowhere else; the bits stay."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from migrator.runtime import log_softmax

ROWS, CLASSES = 256, 1024  # 1 MiB
TARGETS = torch.arange(ROWS)


@pytest.fixture
def installed() -> Iterator[None]:
    log_softmax.install()
    yield
    log_softmax.uninstall()


def logits(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(3)
    return torch.randn(shape or (ROWS, CLASSES)).to(dtype).requires_grad_()


def step(x: Tensor, hook: Callable[[Tensor], Any] | None = None, dim: int = 1) -> tuple[int, int]:
    """One backward; where log-softmax's gradient lay, and where the one made of it does."""
    at = []

    def look(grad: Tensor) -> None:
        at.append(grad.data_ptr())
        if hook is not None:
            hook(grad)

    out = F.log_softmax(x, dim)
    out.register_hook(look)
    F.nll_loss(out, torch.zeros(out.shape[:1] + out.shape[2:], dtype=torch.long)).backward()
    assert x.grad is not None
    return at[0], x.grad.data_ptr()


def plain(x: Tensor, **how: Any) -> Tensor:
    """The gradient without us."""
    log_softmax.uninstall()
    other = x.detach().clone().requires_grad_()
    step(other, **how)
    assert other.grad is not None
    return other.grad


@pytest.mark.usefixtures("installed")
def test_gradient_that_nobody_has_is_written_over() -> None:
    made_of, made = step(logits())
    assert made == made_of


def test_installing_says_nothing_and_is_undone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log_softmax.install()
        log_softmax.install()
        step(logits())
    log_softmax.uninstall()
    log_softmax.uninstall()
    made_of, made = step(logits())
    assert made != made_of


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "dim"), [((600, 1001), 1), ((8, 70_001), 1), ((70_000, 8), 1), ((8, 21, 64, 64), 1)])
def test_bits_are_the_same(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    x = logits(*shape, dtype=dtype)
    made_of, made = step(x, dim=dim)
    assert made == made_of
    assert x.grad is not None
    assert torch.equal(x.grad, plain(x, dim=dim))


HOLDERS: dict[str, Callable[[Tensor], object]] = {
    "it": lambda grad: grad,
    "a view": lambda grad: grad.view(-1),
    "it detached": lambda grad: grad.detach(),
    "its memory": lambda grad: grad.untyped_storage(),
    "its memory by type": lambda grad: grad._typed_storage(),
    "its numbers in numpy": lambda grad: grad.numpy(),
    "a capsule of it": lambda grad: torch.utils.dlpack.to_dlpack(grad),
    "an attribute of another": lambda grad: setattr(TARGETS, "grad_of_losses", grad),
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("holder", HOLDERS)
def test_gradient_that_a_hook_keeps_is_left_alone(holder: str) -> None:
    held: list[object] = []
    made_of, made = step(x := logits(), lambda grad: held.append(HOLDERS[holder](grad)))
    assert made != made_of
    TARGETS.__dict__.clear()
    assert x.grad is not None
    assert torch.equal(x.grad, plain(x))


@pytest.mark.usefixtures("installed")
def test_gradient_that_a_hook_looked_at_only_is_written_over() -> None:
    made_of, made = step(logits(), lambda grad: (grad.view(-1), grad.detach(), grad.untyped_storage()))
    assert made == made_of


def both(loss_and_grads: Callable[[], list[Tensor]]) -> None:
    """The same bits with it and without."""
    log_softmax.install()
    try:
        ours = loss_and_grads()
    finally:
        log_softmax.uninstall()
    theirs = loss_and_grads()
    assert len(ours) == len(theirs)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


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


def _functional() -> list[Tensor]:
    kept: list[Tensor] = []

    def loss(x: Tensor) -> Tensor:
        out = F.log_softmax(x, 1)
        out.register_hook(kept.append)
        return F.nll_loss(out, TARGETS)

    with torch.no_grad():
        return [torch.func.grad(loss)(logits().detach())]


def _batched() -> list[Tensor]:
    out = F.log_softmax(x := logits(), 1)
    grads = torch.ones(3, ROWS, CLASSES)
    return [*torch.autograd.grad(out, x, grads, is_grads_batched=True), grads]


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
    "two of them": _two_of_them,
    "a later node": _later_node,
    "twice": _twice,
    "differentiated": _differentiated,
    "hooks of the node": _node_hooks,
    "torch.func": _functional,
    "batched": _batched,
    "forward over reverse": _forward_over_reverse,
    "watched by a mode": _watched,
    "a subclass": _wrapped,
    "called by hand": _called_by_hand,
    "checkpointed": _checkpointed,
    "anomaly mode": _anomaly,
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_whoever_has_a_gradient_finds_it_as_it_was(program: str) -> None:
    both(PROGRAMS[program])


def _not_there(storage: int) -> int:
    raise AttributeError


@pytest.mark.parametrize("uses", [_not_there, lambda storage: 1])
def test_pytorch_that_does_not_tell_counts_is_left_alone(
    uses: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    log_softmax._free.cache_clear()
    monkeypatch.setattr(torch._C, "_storage_Use_Count", uses)
    try:
        log_softmax.install()
        made_of, made = step(logits())
    finally:
        log_softmax.uninstall()
        log_softmax._free.cache_clear()
    assert made != made_of


def test_small_ones_are_not_looked_at(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_softmax, "_counts", lambda grad: pytest.fail("it is"))
    step(logits(8, 16))
