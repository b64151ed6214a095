"""Log-softmax's backward writes over its gradient where nobody else has that, and nowhere else; the bits stay."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_tiers as tiers
from tests.unit.held_gradients import CLASSES, PROGRAMS, ROWS, TARGETS, logits
from torch_tiers.migrator import log_softmax
from torch_tiers.migrator.log_softmax import Overwriting


def step(x: Tensor, hook: Callable[[Tensor], Any] | None = None) -> Tensor:
    """The gradient of a loss, whose log-softmax has the hook."""
    x.grad = None
    out = F.log_softmax(x, 1)
    if hook is not None:
        out.register_hook(hook)
    F.nll_loss(out, torch.zeros(out.shape[:1] + out.shape[2:], dtype=torch.long)).backward()
    assert x.grad is not None
    return x.grad


def test_gradient_that_nobody_has_is_written_over(writing_over: Overwriting) -> None:
    before = writing_over.count
    step(logits())
    assert writing_over.count == before + 1


def test_after_uninstalling_none_is(writing_over: Overwriting) -> None:
    writing_over.uninstall()
    before = writing_over.count
    step(logits())
    assert writing_over.count == before


def test_installing_says_nothing(overwriting: Overwriting) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        overwriting.install()
        overwriting.install()
    overwriting.uninstall()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(600, 1001), (8, 70_001), (70_000, 8), (8, 21, 64, 64)])
def test_bits_are_the_same(writing_over: Overwriting, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, before = logits(*shape, dtype=dtype), writing_over.count
    made = step(x)
    assert writing_over.count == before + 1
    writing_over.uninstall()
    assert torch.equal(made, step(x))


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


@pytest.mark.parametrize("holder", HOLDERS)
def test_gradient_that_a_hook_keeps_is_left_alone(writing_over: Overwriting, holder: str) -> None:
    held: list[object] = []
    x, before = logits(), writing_over.count
    made = step(x, lambda grad: held.append(HOLDERS[holder](grad)))
    assert writing_over.count == before
    TARGETS.__dict__.clear()
    assert torch.equal(made, step(x))


@pytest.mark.parametrize("looks", [lambda grad: None, lambda grad: grad * 2, lambda grad: grad.mul_(2)])
def test_gradient_that_a_hook_has_seen_is_left_alone(writing_over: Overwriting, looks: Callable[[Tensor], Any]) -> None:
    """It may have begun a copy of it on another stream, or have told another process where it is."""
    x, before = logits(), writing_over.count
    step(x, looks)
    assert writing_over.count == before


WRITTEN_OVER = {
    "retained": 1,  # PyTorch retains a clone
    "beside a leaf": 1,  # which has a clone as well
    "beside a leaf before it": 1,
    "two of them": 1,
    "twice": 2,
    "differentiated": 1,  # in the second backward
    "checkpointed": 2,
    "anomaly mode": 1,
}
"""How often; in all others somebody has the gradient, or may."""


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_whoever_has_a_gradient_finds_it_as_it_was(writing_over: Overwriting, program: str) -> None:
    before = writing_over.count
    ours = PROGRAMS[program]()
    assert writing_over.count - before == WRITTEN_OVER.get(program, 0)
    writing_over.uninstall()
    theirs = PROGRAMS[program]()
    assert len(ours) == len(theirs)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_kernel_that_somebody_puts_there_runs(writing_over: Overwriting) -> None:
    def sevens(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        return torch.full_like(grad, 7)

    x, library = logits(), torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("_log_softmax_backward_data", sevens, "CPU")
    try:
        assert (step(x) == 7).all()
    finally:
        library._destroy()
    before = writing_over.count
    step(x)
    assert writing_over.count == before + 1


EARLIER = """
import torch
from torch.nn import functional as F
from torch_tiers.migrator import log_softmax
from torch_tiers.places import cache_directory

library = torch.library.Library("aten", "IMPL")
library.impl("_log_softmax_backward_data", lambda grad, *rest: torch.full_like(grad, 7), "CPU")
overwriting = log_softmax.load(log_softmax.build(cache_directory()))
assert not overwriting.install()

def gradient():
    x = torch.randn(256, 1024, requires_grad=True)
    F.cross_entropy(x, torch.arange(256)).backward()
    return x.grad

assert (gradient() == 7).all()
library._destroy()
assert not (gradient() == 7).any()
assert overwriting.install()
gradient()
assert overwriting.count == 1
"""


@pytest.mark.usefixtures("overwriting")  # by now it is built
def test_before_a_kernel_that_somebody_has_put_there_it_does_not_come() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", EARLIER], capture_output=True, text=True)
    assert not done.returncode, done.stderr


@pytest.mark.usefixtures("writing_over")
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float64, torch.float32)])
def test_called_by_hand_it_makes_what_it_made(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    ones = torch.ones(4, 8, dtype=dtypes[0])
    assert torch.ops.aten._log_softmax_backward_data(ones, ones, 1, dtypes[1]).dtype is dtypes[0]


def test_small_ones_are_not_looked_at(writing_over: Overwriting) -> None:
    before = writing_over.count
    step(logits(8, 16))
    assert writing_over.count == before


def test_a_session_has_it_from_its_first_forward_to_its_end(overwriting: Overwriting) -> None:
    model = nn.Linear(64, CLASSES)

    def train() -> int:
        before = overwriting.count
        F.cross_entropy(model(torch.randn(ROWS, 64)), TARGETS).backward()
        return overwriting.count - before

    with tiers.session(native="on"):
        assert train() == 1
    assert train() == 0


def test_without_a_compiler_there_is_none_which_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level("INFO", "tiers"):
        assert log_softmax.find(tmp_path) is None
    assert "no-such-compiler" in caplog.text
