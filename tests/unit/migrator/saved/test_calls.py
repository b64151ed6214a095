"""The shortcut in front of calls of modules: with it and without, the thread is in the same module, hooks on or off."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.natively import built
from torch_tiers.migrator.program.optimizers import Optimizers
from torch_tiers.migrator.saved.garbage import Allowance
from torch_tiers.migrator.saved.saver import Saver
from torch_tiers.migrator.saved.tensors import Calls


class _Thread:
    """A saver of this thread, and what its calls of modules go through."""

    def __init__(self) -> None:
        self.long_way: list[str] = []
        self.saver = Saver(lambda device: None, lambda *_: None, lambda _: None, Allowance(), built())
        self.calls: Calls = built().calls(self._enter, self._leave)
        self.optimizers = Optimizers()
        self.calls.arm(self.saver, self.saver.modules, self.optimizers)

    def _enter(self, module: nn.Module) -> bool:
        self.long_way.append("enter")
        self.saver.enter(module)
        return True

    def _leave(self) -> None:
        self.long_way.append("leave")
        self.saver.leave()


def _nested() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Identity(), nn.Tanh()), nn.ReLU())


def test_a_module_within_another_is_entered_and_left() -> None:
    thread, net = _Thread(), _nested()
    place = thread.saver.place
    assert thread.calls.enter(net)
    assert thread.calls.enter(net[0])
    assert place.here.path == "Sequential.0"
    assert thread.calls.enter(net[0][1])
    assert place.here.path == "Sequential.0.1"
    thread.calls.leave()
    assert place.here.path == "Sequential.0"
    thread.calls.leave()
    thread.calls.leave()
    assert place.here.path == ""
    thread.calls.leave()  # of a module that was entered before: nothing is left to leave
    assert thread.long_way == ["enter", "leave"], "of the outermost alone"


def test_what_is_not_plain_takes_the_long_way() -> None:
    thread, net = _Thread(), _nested()
    thread.calls.enter(net)
    thread.long_way.clear()
    thread.calls.enter(nn.Identity())
    assert thread.long_way == ["enter"], "it has no name yet"
    thread.calls.leave()
    thread.saver.place.recording = True
    thread.calls.enter(net[0])
    assert thread.long_way == ["enter", "enter"]
    thread.saver.place.recording = False
    thread.calls.leave()


def test_while_hooks_rest_only_the_first_module_after_a_step_is_told_of() -> None:
    thread, net = _Thread(), _nested()
    thread.saver.resting = True
    for _ in range(2):
        assert thread.calls.enter(net)
        assert thread.long_way == ["enter"]
        thread.long_way.clear()
        thread.optimizers.period_due = False
        assert not thread.calls.enter(net[0])
        assert not thread.calls.enter(nn.Identity())
        assert thread.long_way == []
        thread.optimizers.period_due = True


def _in_another_thread(work: Callable[[], object]) -> None:
    other = threading.Thread(target=work)
    other.start()
    other.join()


def test_each_thread_takes_the_shortcut_of_its_own_saver() -> None:
    thread, net = _Thread(), _nested()
    thread.calls.enter(net)
    other = Saver(lambda device: None, lambda *_: None, lambda _: None, Allowance(), built())
    thread.long_way.clear()

    def work() -> None:
        thread.calls.enter(net[0])
        thread.calls.leave()
        assert thread.long_way == ["enter", "leave"], "it is not armed"
        thread.calls.arm(other, other.modules, thread.optimizers)
        other.enter(net)
        thread.calls.enter(net[1])
        assert other.place.here.path == "Sequential.1"

    _in_another_thread(work)
    assert thread.long_way == ["enter", "leave"]
    thread.calls.enter(net[0])
    assert thread.saver.place.here.path == "Sequential.0"
    assert thread.long_way == ["enter", "leave"], "the other has not taken it away"


def test_a_thread_that_was_armed_in_another_session_takes_the_long_way() -> None:
    before, net = _Thread(), _nested()
    _Thread()  # which arms this one again
    before.saver.enter(net)
    before.calls.enter(net[0])
    assert before.long_way == ["enter"]


def test_hooks_that_rest_are_the_long_way_s_to_wake() -> None:
    thread, net = _Thread(), _nested()
    thread.calls.enter(net)
    thread.saver.resting = True
    thread.calls.enter(net[0])
    thread.calls.leave()
    assert thread.long_way == ["enter", "enter", "leave"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_nothing_is_entered_while_torchscript_traces() -> None:
    thread, net = _Thread(), _nested()
    thread.calls.enter(net)
    entered = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        entered.append(thread.calls.enter(net[0]))
        return x + 1

    torch.jit.trace(traced, (torch.ones(2),), check_trace=False)
    assert not any(entered)
    assert thread.saver.place.here.path == "Sequential"


def test_it_keeps_nothing_of_a_saver_alive() -> None:
    """A thread that has ended takes its saver along, and all that its modules' nodes lead to: movers and their DRAM."""
    thread, net = _Thread(), _nested()
    thread.calls.enter(net)
    gone = [weakref.ref(thread.saver), weakref.ref(thread.saver.modules)]
    calls, saver = thread.calls, thread.saver
    del thread.saver, saver
    gc.collect()
    assert [each() for each in gone] == [None, None]
    with pytest.raises(AttributeError):  # of the long way here, which has no saver
        calls.enter(net[0])


class _Hooks:
    """Which of a saver's hooks are switched on and off, and when."""

    def __init__(self, saver: Any) -> None:
        self.switched: list[bool] = []

        def bypass(on: bool) -> None:
            self.switched.append(on)
            saver.bypassed = on

        saver.bypass = bypass


@pytest.mark.parametrize("seed", range(20))
def test_the_way_is_the_same_for_any_program(seed: int) -> None:
    """Calls, returns, backwards and modules in which the hooks are off, in any order."""
    order, net = random.Random(seed), _nested()
    modules = [net, *net.children(), *net[0].children(), nn.Identity()]
    threads = _Thread(), _Thread()  # of which the second is armed
    hooks = [_Hooks(thread.saver) for thread in threads]
    ways: list[tuple[Callable[[nn.Module], object], Callable[[], None]]] = [
        (threads[0].saver.enter, threads[0].saver.leave),
        (threads[1].calls.enter, threads[1].calls.leave),
    ]
    paths = ["Sequential", "Sequential.0", "Sequential.0.1", "Sequential.1"]
    for _ in range(200):
        action = order.choice(["enter", "enter", "leave", "leave", "bypass", "turn"])
        module, bypass = order.choice(modules), {path: order.choice([True, False, None]) for path in paths}
        for thread, (enter, leave) in zip(threads, ways, strict=True):
            if action == "enter":
                enter(module)
            elif action == "leave":
                leave()
            elif action == "bypass":
                thread.saver.place.bypass = bypass
            else:
                thread.saver.place.in_backward = not thread.saver.place.in_backward
        states = [(thread.saver.place.here.path, len(thread.saver.modules.stack)) for thread in threads]
        assert states[0] == states[1]
        assert hooks[0].switched == hooks[1].switched
