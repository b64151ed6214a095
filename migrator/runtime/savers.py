"""The hooks of each thread that trains."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import get_worker_info

from torch_tiers.migrator.controller.learned import Learned
from torch_tiers.migrator.saved.saver import Saver


class _Thread(threading.local):
    saver: Saver | None = None


class Savers:
    """One saver for each thread that has trained, as long as the thread lives. Thread-safe.

    Attributes
    ----------
    thread : threading.local
        Its `saver` is the present thread's, if its hooks are on.
    """

    def __init__(self) -> None:
        self.thread = _Thread()
        # Guards the savers, to which threads add while others go through them. Reentrant: a signal's handler, which
        # writes down what happened so far, comes in the middle of whatever the main thread is doing, this included.
        self._listing = threading.RLock()
        self._all: weakref.WeakSet[Saver] = weakref.WeakSet()  # a thread owns its own, and takes it along

    def __iter__(self) -> Iterator[Saver]:
        with self._listing:
            return iter(list(self._all))

    @property
    def is_alone(self) -> bool:
        """Whether one thread trains; else others may be within their iterations when this one's ends."""
        return len(self._all) == 1

    def others(self) -> int:
        """How many threads train besides this one."""
        return len(self._all) - (self.thread.saver is not None)

    def learned(self) -> Learned | None:
        """What any has learned last; of several kinds of iterations those of the one that needs most HBM."""
        learners = [mover.learner for saver in self for mover in saver.movers.armed]
        last = next((learner for learner in reversed(learners) if learner.plans), None)
        if last is None:
            return None
        kinds = zip(last.traces, last.plans, strict=True)
        trace, plan = max(kinds, key=lambda kind: kind[0].saved_bytes + max(kind[0].others, default=0))
        return Learned(replace(trace, varies=last.varies or len(last.traces) > 1), plan, last.corrections)

    def switch_on(self, saver: Saver) -> None:
        """Push the hooks of this thread."""
        with self._listing:
            self._all.add(saver)
        saver.push()
        self.thread.saver = saver  # last: after an interrupt the thread's next forward begins again

    def forked(self) -> None:
        """Switch off what a forked child has of its parent."""
        if self.thread.saver is not None:
            self.thread.saver.pop()
            self.thread.saver.place.in_backward = False  # the shortcut, too, leaves to Python what a fork cannot have
            self.thread.saver = None


def make_way() -> bool:
    """Pop hooks of a stale session; return whether a forward in this thread could train, and none are in the way."""
    if not torch.is_grad_enabled() or get_worker_info() is not None or torch._C._current_graph_task_id() != -1:
        return False
    autograd: Any = torch._C._autograd
    if not autograd._saved_tensors_hooks_is_enabled():
        return False
    top = autograd._top_saved_tensors_default_hooks(True)
    if top is not None:
        # Hooks form a stack. Pushed on top of somebody's, ours would be what his `with` block pops at its end.
        stale = getattr(top[0], "__self__", None)
        if not isinstance(stale, Saver):
            return False
        stale.pop()  # of a session that another thread ended, which could not do this
    return True
