"""Checks, with a small program at load time, that the recorder sees what this version of PyTorch runs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_tiers.allocator.errors import TiersError

Call = tuple[str, list[tuple[int, ...]]]

SHOWN_TO_MODES_ALONE = "aten::detach"
"""PyTorch shows it to a mode wherever it copies a tensor's head, with no operator run."""

AS_UNDER_A_MODE = {"aten::add_.Tensor": "aten::add.Tensor", "aten::_reshape_alias": "aten::view"}
"""What PyTorch runs otherwise under a mode: backward adds up gradients out of place, and a reshape is a view."""


class Records(Protocol):
    """The recorder of operators; see `migrator.tape.recorder`."""

    @property
    def is_recording(self) -> bool: ...  # noqa: D102
    def begin(self) -> bool: ...  # noqa: D102
    def listed(self) -> list[Call] | None: ...  # noqa: D102
    def stop(self) -> None: ...  # noqa: D102


class Untrue(TiersError):
    """What was recorded is not what ran."""


class Listing(TorchDispatchMode):
    """Lists operators and the shapes of what they return, in Python."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operator."""
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        self.calls.append((name, [tuple(each.shape) for each in tree_leaves(result) if isinstance(each, Tensor)]))
        return result


def comparable(calls: Iterable[Call]) -> list[Call]:
    """What a mode and the recorder have in common."""
    return [(AS_UNDER_A_MODE.get(name, name), shapes) for name, shapes in calls if name != SHOWN_TO_MODES_ALONE]


def check(recorder: Records) -> None:
    """Compare operators, views among them, and bits with recording, and without.

    Raises
    ------
    Untrue
        If they differ, or the program fails.
    """
    if recorder.is_recording:
        raise Untrue("operators are recorded already")
    try:
        with ExitStack() as stack:
            _as_ever(stack)
            expected = _program()
            listing = Listing()
            with listing:
                _program()
            if not recorder.begin():
                raise Untrue("operators are recorded already")
            try:
                found = _program()
                recorded = recorder.listed()
            finally:
                recorder.stop()
    except RuntimeError as error:
        raise Untrue(f"operators cannot be recorded: {error}") from error
    if recorded is None:
        raise Untrue("operators cannot be recorded: what one was given or returned could not be read")
    calls, expected_calls = comparable(recorded), comparable(listing.calls)
    if calls != expected_calls:
        raise Untrue(f"operators are not recorded as they run: {_first_difference(calls, expected_calls)}")
    if not all(map(torch.equal, found, expected)):
        raise Untrue("operators compute something else while they are recorded")


def _as_ever(stack: ExitStack) -> None:
    """Whatever the program has set, or is in the middle of."""
    stack.enter_context(temporarily_clear_interpreter_stack())  # `vmap` or `jvp` may be what calls a model first
    stack.enter_context(torch.inference_mode(mode=False))
    stack.enter_context(torch.enable_grad())
    stack.enter_context(torch.autocast("cpu", enabled=False))
    stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
    stack.enter_context(torch.device("cpu"))


def _program() -> list[Tensor]:
    """A forward and a backward that draw nothing from a generator of the program's."""
    weight = torch.arange(48, dtype=torch.float32).reshape(6, 8).sub(20).div(40).requires_grad_()
    image = torch.arange(2 * 2 * 6 * 6, dtype=torch.float32).reshape(2, 2, 6, 6).sin()
    kernel = torch.arange(36, dtype=torch.float32).reshape(2, 2, 3, 3).cos().requires_grad_()
    generator = torch.Generator().manual_seed(1)
    x = F.relu(F.conv2d(image, kernel, padding=1), inplace=True).flatten(1)[:, :8]
    x = x * torch.bernoulli(torch.full_like(x, 0.5), generator=generator)
    heads = F.linear(x, weight).view(2, 3, 1, 2)
    out = F.scaled_dot_product_attention(heads, heads, heads)
    first, second = torch.cat([out, out], dim=-1).chunk(2, dim=1) if out.shape[1] % 2 == 0 else (out, out)
    loss = F.layer_norm(first + second.sigmoid(), (2,)).pow(2).sum((0, 2)) + 1
    loss.backward(torch.ones_like(loss))  # a scalar would pass for a loss of the program's
    assert weight.grad is not None and kernel.grad is not None
    return [loss.detach(), weight.grad, kernel.grad]


def _first_difference(found: list[Call], expected: list[Call]) -> str:
    for number, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one != other:
            return f"the {number}th is {one}, and not {other}"
    return f"{len(found)} of {len(expected)}"
