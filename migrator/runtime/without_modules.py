"""Programs that call no module: what they do from one optimizer step to the next is taken for a module's call.

So it has a beginning, and its tensors have names, as those of a model. It is no longer so in a thread that calls a
module: some make an optimizer's step, to have its state, before their model runs for the first time.
"""

from __future__ import annotations

import threading
import weakref
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn
from torch.fx import GraphModule


class Listener(Protocol):
    """What a runtime is told; see `migrator.runtime.entry.Listener`."""

    def enter(self, module: nn.Module) -> object: ...  # noqa: D102
    def leave(self) -> None: ...  # noqa: D102
    def saver(self) -> Any: ...  # noqa: D102


class Program(nn.Module):
    """Stands for a program that calls no module. Its parameters are those of its optimizers.

    Attributes
    ----------
    optimizers : set of Optimizer
        Those that have stepped and are alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.optimizers = weakref.WeakSet[torch.optim.Optimizer]()

    # Asked of the optimizers each time: a program may replace its parameters, which nobody else is to hold then. They
    # need not be `nn.Parameter`.
    @property
    def _parameters(self) -> dict[str, Any]:
        groups = [
            group["params"] for optimizer in self.__dict__.get("optimizers", ()) for group in optimizer.param_groups
        ]
        return {str(number): parameter for number, parameter in enumerate(chain.from_iterable(groups))}

    @_parameters.setter
    def _parameters(self, value: object) -> None:
        pass  # which `nn.Module` begins with


class WithoutModules:
    """The programs without modules of one session's threads."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._thread = threading.local()

    def stepping(self) -> None:
        """An optimizer begins a step in this thread: what comes before it is over."""
        if getattr(self._thread, "within", None) is not None:
            self._thread.within = None
            self._listener.leave()

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made a step in this thread: what comes until the next one begins."""
        program = getattr(self._thread, "program", None)
        if program is None:
            if hasattr(self._thread, "program") or self._listener.saver() is not None:
                return  # it calls modules
            program = self._thread.program = Program()
        program.optimizers.add(optimizer)
        if torch._C._current_graph_task_id() == -1:
            self._thread.within = (self._listener.enter(program),)  # which is held for as long as that lasts

    def module_called(self, module: nn.Module) -> None:
        """A module is called in this thread. What `torch.compile` makes of functions are modules, too."""
        if getattr(self._thread, "program", None) is not None and not isinstance(module, GraphModule):
            self.stepping()
            self._thread.program = None
