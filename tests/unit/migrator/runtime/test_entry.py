"""Where PyTorch calls us: once for each thing that happens, whoever was there before, and whoever came since."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from migrator.runtime import entry


class _Raises(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


class _Named(nn.Module):
    """Has arguments by the names that whoever stands before it may have for its own."""

    def forward(self, *, module: Tensor, args: Tensor) -> Tensor:
        return module + args


class _Own(nn.Module):
    """Dynamo compiles the forwards of others' modules, and leaves PyTorch's own as they are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def _called(listener: mock.Mock) -> list[Any]:
    """What a listener was told, without arguments."""
    return [call[0] for call in listener.method_calls if call[0] in ("enter", "leave")]


@pytest.fixture
def listener() -> Iterator[mock.Mock]:
    installed = mock.Mock()
    entry.install(installed)
    yield installed
    entry.uninstall()


def test_hooks_that_a_fork_has_left_behind_are_not_called_besides() -> None:
    """A child that opened a session of its own counted every step twice."""
    before, listener = mock.Mock(), mock.Mock()
    entry.install(before)
    try:
        hooks = len(entry._handles)
        entry._after_fork()
        entry.install(listener)
        assert len(entry._handles) == hooks
        nn.Identity()(1)
        assert _called(listener) == ["enter", "leave"]
        assert _called(before) == []
    finally:
        entry.uninstall()
        entry._left_behind = False


def test_tells_of_a_call_with_what_it_was_given_and_what_it_gave(listener: mock.Mock) -> None:
    module, x = nn.Linear(2, 2), torch.ones(2)
    y = module(input=x)
    listener.enter.assert_called_once_with(module, ())
    listener.leave.assert_called_once_with(module, (), {"input": x}, y)


def test_tells_of_no_end_where_nobody_asked_for_it(listener: mock.Mock) -> None:
    listener.enter.return_value = False
    nn.Identity()(1)
    assert _called(listener) == ["enter"]


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt()])
def test_tells_of_the_end_of_a_forward_that_raises(listener: mock.Mock, error: BaseException) -> None:
    """PyTorch's hooks are not called for an interrupt: the path of modules would keep what was left."""
    module = _Raises(error)
    with pytest.raises(type(error)):
        module(1)
    listener.leave.assert_called_once_with(module, (1,), None, None)


def test_takes_none_of_a_module_s_arguments_for_its_own(listener: mock.Mock) -> None:
    assert _Named()(module=torch.ones(1), args=torch.ones(1)) == 2
    listener.enter.assert_called_once()


@pytest.mark.parametrize("compiled", [False, True])
def test_tells_once_of_a_module_compiled_in_place(listener: mock.Mock, *, compiled: bool) -> None:
    module = _Own(nn.Linear(2, 2))
    if compiled:
        module.compile(backend="eager", fullgraph=True)
    module(torch.ones(2))
    module(torch.ones(2))
    expected = [module, module] if compiled else [module, module.inner, module, module.inner]
    assert [call.args[0] for call in listener.enter.call_args_list] == expected
    assert listener.leave.call_count == len(expected)


def test_leaves_pytorch_its_short_way(listener: mock.Mock) -> None:
    """With global hooks of any kind a module's call takes PyTorch twice the time, a compiled one's more."""
    assert not torch.nn.modules.module._has_any_global_hook()


def test_what_somebody_has_put_over_ours_stays_and_tells_no_session_twice() -> None:
    plain, first, second = nn.Module.__call__, mock.Mock(), mock.Mock()
    entry.install(first)
    ours = nn.Module.__call__

    def theirs(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return ours(self, *args, **kwargs)

    try:
        with mock.patch.object(nn.Module, "__call__", theirs):
            entry.uninstall()
            assert nn.Module.__call__ is theirs
            entry.install(second)
            nn.Identity()(1)
            assert _called(first) == []
            assert _called(second) == ["enter", "leave"]
            entry.uninstall()
            assert nn.Module.__call__ is theirs
    finally:
        entry.uninstall()
        nn.Module.__call__ = plain  # type: ignore[method-assign]


def test_the_profiler_finds_the_modules(listener: mock.Mock) -> None:
    """It looks for a `self` in the frame of `nn.Module.__call__`, and does not look whether there is one."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with torch.profiler.profile(with_stack=True, with_modules=True) as profile:
        model(torch.ones(2))
    names = {event.name for event in profile.events()}
    assert {"nn.Module: Sequential_0", "nn.Module: Linear_0", "nn.Module: ReLU_0"} <= names
