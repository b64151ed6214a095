"""Where PyTorch calls us: once for each thing that happens, whoever was there before, and whoever came since."""

from __future__ import annotations

import gc
import pickle
import sys
import weakref
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


def test_of_a_module_with_hooks_of_its_own_it_tells_what_its_forward_was_given_and_gave(listener: mock.Mock) -> None:
    """What hooks save is not forward's to recompute, and what they give forward the program may change."""
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(lambda _, args: (2 * args[0],))
    module.register_forward_hook(lambda *_: order.append("its own") or torch.zeros(2))
    module.register_full_backward_hook(lambda *_: None)
    order: list[str] = []
    listener.leave.side_effect = lambda *_: order.append("leave")
    x = torch.ones(2, requires_grad=True)
    assert torch.equal(module(x), torch.zeros(2))
    (_, args, named, output), _ = listener.leave.call_args
    assert torch.equal(args[0], 2 * x) and named == {}
    assert output.grad_fn.name() != "BackwardHookFunctionBackward"
    assert order == ["leave", "its own"]
    assert len(module._forward_hooks) == 1


def test_a_module_with_hooks_of_its_own_that_calls_itself_is_told_of_in_order(listener: mock.Mock) -> None:
    class Again(nn.Module):
        def forward(self, depth: int) -> int:
            return self(depth - 1) + 1 if depth else 0

    module = Again()
    module.register_forward_hook(lambda *_: None)
    assert module(2) == 2
    assert _called(listener) == ["enter"] * 3 + ["leave"] * 3
    assert [call.args[3] for call in listener.leave.call_args_list] == [0, 1, 2]


def test_a_module_with_hooks_of_its_own_is_left_when_one_of_them_raises(listener: mock.Mock) -> None:
    def fails(*_: Any) -> None:
        raise ValueError

    before, after = nn.Identity(), nn.Identity()
    before.register_forward_pre_hook(fails)
    after.register_forward_hook(fails)
    for module in (before, after):
        with pytest.raises(ValueError):
            module(1)
    assert _called(listener) == ["enter", "leave"] * 2
    assert listener.leave.call_args_list[0].args[2] is None


def test_a_listener_does_not_outlive_its_session() -> None:
    listener = mock.Mock()
    gone = weakref.ref(listener)
    entry.install(listener)
    call, bound = nn.Module.__call__, nn.Identity().__call__
    entry.uninstall()
    del listener
    gc.collect()
    assert gone() is None
    assert call(nn.Identity(), 1) == bound(1) == 1


@pytest.mark.parametrize("early", [False, True])
def test_dynamo_knows_a_module_s_call_in_a_session_and_after(monkeypatch: pytest.MonkeyPatch, *, early: bool) -> None:
    """One that it does not know it traces, down to `forward`, and compiles anew when it is another."""
    plain = nn.Module.__call__
    dynamo = mock.Mock(unpatched_nn_module_call=plain)
    if early:
        monkeypatch.setitem(sys.modules, "torch._dynamo.utils", dynamo)
    else:
        monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    entry.install(mock.Mock())
    dynamo.unpatched_nn_module_call = dynamo.unpatched_nn_module_call if early else nn.Module.__call__
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", dynamo)
    assert dynamo.unpatched_nn_module_call is nn.Module.__call__ is not plain
    entry.uninstall()
    assert dynamo.unpatched_nn_module_call is nn.Module.__call__ is plain


def test_a_module_s_call_can_be_pickled(listener: mock.Mock) -> None:
    assert pickle.loads(pickle.dumps(nn.Module.__call__)) is nn.Module.__call__
    assert pickle.loads(pickle.dumps(nn.Identity().__call__))(1) == 1
