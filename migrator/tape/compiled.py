"""Keeps compiled code off the record: its kernels fill buffers behind the dispatcher.

And Dynamo compiles again where the keys of the dispatcher differ from those it compiled under. So the key is excluded
before it compares them, in whatever it runs, and in what Inductor has made for a backward, which autograd calls.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from types import FrameType, ModuleType
from typing import Any

from torch_tiers.migrator.tape import native

_DYNAMO = "torch._dynamo.eval_frame"  # to import it takes seconds, and the program may not need it
_INDUCTOR = "torch._inductor.output_code"
_RUNS_COMPILED = "compile_wrapper"  # in which Dynamo calls what is compiled; what is not to be has another

Callback = Any


class Compiled:
    """Has nothing recorded of what is compiled, from `install` to `remove`.

    Parameters
    ----------
    library : native.Recorder
        Which is paused there, and whose clock is told of all that runs meanwhile.
    """

    def __init__(self, library: native.Recorder) -> None:
        self._library = library
        self._for: set[str] = set()  # who has it installed
        self._undo: list[tuple[Any, str, Any, Any]] = []  # whose, which, what it was, what it is
        self._lock = threading.Lock()
        self._open = 0  # of Dynamo's wrappers, in all threads, within which recording is paused
        self._leaves = False  # once none is open

    def install(self, whose: str) -> None:
        """From now on, for what is imported by now. In one thread at a time."""
        with self._lock:
            self._for.add(whose)
            self._leaves = False
            if self._open:  # a wrapper around us
                return
            self._put_back()  # another may have it installed, and more may be imported since
        dynamo, inductor = sys.modules.get(_DYNAMO), sys.modules.get(_INDUCTOR)
        if dynamo is not None and hasattr(dynamo, "set_eval_frame") and hasattr(dynamo, "_maybe_set_eval_frame"):
            self._watch(dynamo)
        base: Any = getattr(inductor, "OutputCode", None)
        for each in list(vars(inductor).values()) if base is not None else ():
            if isinstance(each, type) and issubclass(each, base) and "__call__" in vars(each):
                self._put(each, "__call__", self._untracked(vars(each)["__call__"]))

    def remove(self, whose: str) -> None:
        """All as it was, once nobody has it installed and no wrapper is open: its end resumes.

        Who has put something else there keeps that.
        """
        with self._lock:
            self._for.discard(whose)
            if self._for:
                return
            self._leaves = True
            if not self._open:
                self._put_back()

    def _count(self, change: int) -> None:
        with self._lock:
            self._open += change
            if self._leaves and not self._open:
                self._put_back()

    def _put_back(self) -> None:
        while self._undo:
            owner, name, before, ours = self._undo.pop()
            if vars(owner).get(name) is ours:
                setattr(owner, name, before)

    def _put(self, owner: Any, name: str, ours: Any) -> None:
        self._undo.append((owner, name, vars(owner)[name], ours))
        setattr(owner, name, ours)

    def _untracked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def untracked(*args: Any, **kwargs: Any) -> Any:
            was, span = self._library.pause(), self._library.clock_enter()
            try:
                return function(*args, **kwargs)
            finally:
                self._library.clock_leave(span)
                self._library.resume(was)

        return untracked

    def _watch(self, dynamo: ModuleType) -> None:
        """Pause where Dynamo's wrapper begins, before it notes the keys, and resume where it ends.

        It begins with `prior = set_eval_frame(None)`, and ends with `_maybe_set_eval_frame(prior)`; in between it calls
        either with something else. Where that is the same by chance, as while Dynamo is told to run all eagerly, we
        resume too early, and pause again at the next `set_eval_frame(None)`. By then the dispatcher's keys may be those
        that the wrapper noted, in which we are paused: what was before that is what it was at the first.
        """
        set_frame, maybe_set_frame = dynamo.set_eval_frame, dynamo._maybe_set_eval_frame
        threads = threading.local()

        def inside() -> list[tuple[FrameType, Callback, bool, int]]:
            found: list[tuple[FrameType, Callback, bool, int]] = threads.__dict__.setdefault("inside", [])
            return found

        def set_eval_frame(callback: Callback) -> Callback:
            caller, within = sys._getframe(1), inside()
            begins = caller.f_code.co_name == _RUNS_COMPILED and not (within and within[-1][0] is caller)
            was = self._library.pause() if begins else False
            prior = set_frame(callback)
            if begins:
                before = threads.__dict__.pop("resumed", (0, was))
                was = before[1] if before[0] == id(caller) else was
                within.append((caller, prior, was, self._library.clock_enter()))
                self._count(1)
            return prior

        def maybe_set_eval_frame(callback: Callback) -> Callback:
            within = inside()
            if within and within[-1][0] is sys._getframe(1) and callback is within[-1][1]:
                frame, _, was, span = within.pop()
                self._library.clock_leave(span)
                self._library.resume(was)
                threads.resumed = id(frame), was  # not the frame, with all that it holds
                self._count(-1)
            return maybe_set_frame(callback)

        self._put(dynamo, "set_eval_frame", set_eval_frame)
        self._put(dynamo, "_maybe_set_eval_frame", maybe_set_eval_frame)
