"""Log-softmax's backward writes over its gradient where nobody else has that, and nowhere else; the bits stay."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, multiprocessing, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tiers
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
    "a gradient to be differentiated": _differentiable_gradient,
    "a gradient made in inference mode": _inference_gradient,
    "a gradient with attributes": _marked,
    "a gradient of another class": _of_another_class,
    "half of a tensor": _half_of_a_tensor,
    "held weakly": _weakly_held,
    "strides of one": _strides,
    "of two processes": _of_two_processes,
    "checkpointed": _checkpointed,
    "anomaly mode": _anomaly,
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_whoever_has_a_gradient_finds_it_as_it_was(program: str) -> None:
    both(PROGRAMS[program])


def _not_there(storage: int) -> int:
    raise AttributeError


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process in which nobody has looked what counts are."""
    monkeypatch.setattr(log_softmax, "_free", None)
    monkeypatch.setattr(log_softmax, "_tries", 0)


@pytest.mark.usefixtures("unseen", "installed")
@pytest.mark.parametrize("uses", [_not_there, lambda storage: 1])
def test_pytorch_that_does_not_tell_counts_is_left_alone(
    uses: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "_storage_Use_Count", uses)
    made_of, made = step(logits())
    assert made != made_of
    assert log_softmax._free is None


@pytest.mark.usefixtures("unseen", "installed")
def test_counts_are_looked_at_once_and_not_under_a_tracer() -> None:
    """A debugger that looks at frames has references to what is in them."""
    threading.settrace(lambda *args: None)
    try:
        made_of, made = step(logits())
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
    assert made != made_of
    for _ in range(3):
        made_of, made = step(logits())
        assert made == made_of
    assert log_softmax._tries == 2


@pytest.mark.usefixtures("unseen", "installed")
def test_counts_are_those_of_this_thread_while_others_train() -> None:
    over = threading.Event()

    def train() -> None:
        x = logits(4, 8)
        while not over.is_set():
            F.log_softmax(x, 1).sum().backward()

    others = [threading.Thread(target=train) for _ in range(2)]
    for other in others:
        other.start()
    try:
        made_of, made = step(logits())
    finally:
        over.set()
        for other in others:
            other.join()
    assert made == made_of


def test_kernel_that_somebody_has_put_there_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_softmax, "_registered", {})
    monkeypatch.setattr(torch.library, "_impls", {f"aten/{log_softmax.NAME}/CPU"}, raising=False)
    log_softmax.install()
    log_softmax.uninstall()
    assert not log_softmax._registered


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float64, torch.float32)])
def test_called_by_hand_it_makes_what_it_made(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    ones = torch.ones(4, 8, dtype=dtypes[0])
    assert torch.ops.aten._log_softmax_backward_data(ones, ones, 1, dtypes[1]).dtype is dtypes[0]


@pytest.mark.parametrize(
    "transformed",
    [
        lambda m, x: torch.vmap(m)(x),
        lambda m, x: torch.func.jvp(m, (x,), (x,)),
        lambda m, x: torch.func.jacfwd(m)(x),
        pytest.param(
            lambda m, x: torch.jit.trace(m, (x,)), marks=pytest.mark.filterwarnings("ignore::DeprecationWarning")
        ),
    ],
)
@pytest.mark.usefixtures("unseen")
def test_a_session_begins_within_whatever_is_on(transformed: Callable[[nn.Module, Tensor], object]) -> None:
    with tiers.session():
        transformed(nn.Linear(64, 8), torch.randn(4, 64))


def test_small_ones_are_not_looked_at(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_softmax, "_counts", lambda grad: pytest.fail("it is"))
    step(logits(8, 16))
