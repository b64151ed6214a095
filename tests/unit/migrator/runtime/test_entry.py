"""Where PyTorch calls us: once for each thing that happens, whoever was there before, and whoever came since."""

from __future__ import annotations

import gc
import pickle
import sys
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.scenarios import Own
from torch_tiers.migrator.runtime import entry
from torch_tiers.migrator.saved.stack import OnStack


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


def test_tells_of_a_call_and_its_end(listener: mock.Mock) -> None:
    module, x = nn.Linear(2, 2), torch.ones(2)
    module(input=x)
    listener.enter.assert_called_once_with(module)
    listener.leave.assert_called_once_with()


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
    listener.leave.assert_called_once_with()


def test_takes_none_of_a_module_s_arguments_for_its_own(listener: mock.Mock) -> None:
    assert _Named()(module=torch.ones(1), args=torch.ones(1)) == 2
    listener.enter.assert_called_once()


@pytest.mark.parametrize("compiled", [False, True])
def test_tells_once_of_a_module_compiled_in_place(listener: mock.Mock, *, compiled: bool) -> None:
    module = Own(nn.Linear(2, 2))
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


def _doubled(module: nn.Module, args: tuple[Tensor, ...], *output: Tensor) -> Tensor | tuple[Tensor, ...]:
    return 2 * output[0] if output else (2 * args[0],)


@pytest.mark.filterwarnings("default")  # PyTorch's own, where it compiles a hook
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_module_may_have_hooks_of_its_own(listener: mock.Mock, kind: str, *, in_place: bool) -> None:
    """What stood between these and its forward was a frame to Dynamo, which ended a program with fullgraph."""
    torch.compiler.reset()
    module = Own(nn.Linear(2, 2))
    hook = _doubled if kind.startswith("forward") else lambda *_: None
    getattr(module, f"register_{kind}_hook")(hook)
    if in_place:
        module.compile(backend="eager", fullgraph=True)
    compiled: nn.Module = module if in_place else torch.compile(module, backend="eager", fullgraph=True)
    x = torch.ones(2, requires_grad=True)
    expected = module.inner(2 * x if kind == "forward_pre" else x) * (2 if kind == "forward" else 1)
    listener.reset_mock()
    for _ in range(2):
        assert torch.equal(compiled(x), expected)
    assert _called(listener).count("enter") == _called(listener).count("leave") == (2 if in_place else 4)


def test_a_call_ends_with_the_hooks_of_the_module(listener: mock.Mock) -> None:
    """No hook of ours stands in a module's own lists, which its copies, its pickles and other threads have, too."""
    module, order = nn.Linear(2, 2), list[str]()
    module.register_forward_hook(lambda *_: order.append(f"its own, {len(module._forward_hooks)} in all"))
    listener.leave.side_effect = lambda *_: order.append("leave")
    module(torch.ones(2))
    assert order == ["its own, 1 in all", "leave"]


def test_what_fails_to_install_is_not_active() -> None:
    plain = nn.Module.__call__
    with mock.patch.object(entry.peaks, "install", side_effect=ArithmeticError), pytest.raises(ArithmeticError):
        entry.install(mock.Mock())
    assert nn.Module.__call__ is plain
    entry.install(mock.Mock())
    entry.uninstall()


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


def test_to_uninstall_what_is_not_installed_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a Dynamo either that knows a module's call by another name."""
    another = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", another)
    plain = nn.Module.__call__
    entry.uninstall()
    assert nn.Module.__call__ is plain
    assert not vars(another)


def test_a_module_s_call_can_be_pickled(listener: mock.Mock) -> None:
    assert pickle.loads(pickle.dumps(nn.Module.__call__)) is nn.Module.__call__
    assert pickle.loads(pickle.dumps(nn.Identity().__call__))(1) == 1


class _Hooks(OnStack):
    def pack(self, tensor: Tensor) -> Tensor:
        return tensor.detach()

    def unpack(self, packed: Tensor) -> Tensor:
        return packed


def _are_on() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@pytest.mark.parametrize("run", ["backward", "grad", "in_a_backward", "raises"])
def test_hooks_are_off_while_a_backward_runs_and_on_after_it(listener: mock.Mock, run: str) -> None:
    """The engine copies those on the stack for each node, with the interpreter's lock, several times."""
    hooks = listener.saver.return_value = _Hooks()
    hooks.push()
    on = []
    x = torch.ones(2, requires_grad=True)
    y = x.exp().sum()

    def hook(grad: Tensor) -> None:
        if run == "in_a_backward":
            with torch.enable_grad():
                (2 * x).sum().backward()
        on.append(_are_on())
        if run == "raises":
            raise KeyboardInterrupt

    y.register_hook(hook)
    with pytest.raises(KeyboardInterrupt) if run == "raises" else nullcontext():
        if run == "grad":
            torch.autograd.grad(y, x, create_graph=True)[0].sum().backward()
        else:
            y.backward()
    assert (on, _are_on()) == ([False], True)
    assert hooks.take_off()


def test_a_backward_is_pytorch_s_own_after_the_session() -> None:
    autograd: Any = torch.autograd
    plain = autograd._engine_run_backward
    entry.install(mock.Mock())
    kept = autograd._engine_run_backward
    entry.uninstall()
    assert autograd._engine_run_backward is plain is not kept
    x, one = torch.ones(2, requires_grad=True), torch.ones(())
    found = kept((x.sum(),), (one,), False, False, (x,), allow_unreachable=True, accumulate_grad=False)
    assert found[0].tolist() == [1, 1]


def test_what_somebody_has_put_in_the_place_of_backward_runs_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before, since = mock.Mock(), mock.Mock()
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", before)
    entry.install(mock.Mock())
    torch.ones(2, requires_grad=True).sum().backward()
    before.assert_called_once()
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", since)
    entry.uninstall()
    assert torch.autograd._engine_run_backward is since  # type: ignore[attr-defined]
