"""Runs planning jobs in a process beside the program, while training goes on.

Not a thread: whoever computes in this process holds the interpreter for milliseconds at a time, and training asks
for it with every tensor it saves. The process starts from nothing, knows neither the program nor PyTorch, and ends
with its job: after `DEADLINE` seconds at the latest, and with the program.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

log = logging.getLogger("tiers")

T = TypeVar("T")

DEADLINE = 120.0
"""Seconds that a process has for its plans. The longest trace takes some tens; one that is stuck takes for ever."""

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG, which the kernel clears for no exec

_planners: set[int] = set()  # processes that are at work


def planners() -> frozenset[int]:
    """The processes that plan now: what they take is not the program's."""
    return frozenset(_planners)  # in one step of the interpreter's, as threads come and go


class FromProcess(Future[T]):
    """What a process computes beside the program, which may come to have no use for it."""

    def __init__(self) -> None:
        super().__init__()
        self.given_up = False
        self._planner: subprocess.Popen[bytes] | None = None
        self._deciding = threading.Lock()

    def started(self, planner: subprocess.Popen[bytes]) -> None:
        """That process was started."""
        with self._deciding:
            self._planner = planner
            if self.given_up:
                planner.kill()

    def ended(self) -> None:
        """It has ended: its number may be another's by now."""
        with self._deciding:
            self._planner = None

    def give_up(self) -> None:
        """Nobody waits for the result: end what computes it."""
        with self._deciding:
            self.given_up = True
            if self._planner is not None:
                self._planner.kill()


def give_up(future: Future[T] | None) -> None:
    """Nobody waits for a result: end what computes it beside the program, if anything does."""
    if isinstance(future, FromProcess):
        future.give_up()


_SERVE = "import sys; from torch_tiers.migrator.controller.background import serve; serve(int(sys.argv[1]))"


def in_background(job: Callable[[], T]) -> Future[T]:
    """Have `job` done beside the program, which does not wait for it at its end.

    What cannot be sent to a process, such as a function within another, is done in a thread.
    """
    future = FromProcess[T]()

    def work() -> None:
        try:
            future.set_result(_elsewhere(job, future))
        except BaseException as error:
            future.set_exception(error)

    _start(work)
    return future


def in_thread(job: Callable[[], T]) -> Future[T]:
    """Have `job` done in a thread of this process; who asks for it is to wait for it.

    Not in that one's own: what a signal's handler raises meanwhile, such as a timeout, is the program's, and no result.
    """
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)

    _start(work)
    return future


def at_once(job: Callable[[], T]) -> Future[T]:
    """Have `job` done while this thread waits for it."""
    future = in_thread(job)
    future.exception()
    return future


def _start(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work, name="tiers-planner", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        if thread.ident is not None:  # it has started: a signal's handler raised that
            raise
        work()  # no thread can be had


def _elsewhere(job: Callable[[], T], future: FromProcess[T]) -> T:
    try:
        sent = pickle.dumps(job)
    except (AttributeError, TypeError, pickle.PicklingError):
        return job()
    here = str(Path(__file__).parents[3])  # where this program has the package from
    # Without what would make the new process train, or look like a rank that does.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TIERS_")}
    path = os.pathsep.join(filter(None, (here, environ.get("PYTHONPATH"))))
    try:
        result, error = pickle.loads(_answer_to(sent, {**environ, "PYTHONPATH": path}, future))
    except Exception as error:
        if future.given_up:
            raise
        if isinstance(error, subprocess.TimeoutExpired):  # here it would take as long, and hold training up
            raise TimeoutError(f"the process for that took more than {error.timeout:g} s") from None
        # No process may be started, or what comes from it is no answer: what a job raises is one.
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().rpartition("\n")[2]
        _say_once(said or str(error))
        return job()
    if error is not None:
        raise error
    answer: T = result
    return answer


_said: set[str] = set()


def _say_once(why: str) -> None:
    if why not in _said:  # it may well be so for every plan
        _said.add(why)
        log.info("plans are made in this process, which may delay training: %s", why)


def _answer_to(sent: bytes, environ: dict[str, str], future: FromProcess[T]) -> bytes:
    # Without the directory that it is started in, which may hold modules of any name.
    command, pipe = [sys.executable, "-P", "-c", _SERVE, str(os.getpid())], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environ) as planner:
        _planners.add(planner.pid)
        try:
            future.started(planner)
            answer, said = planner.communicate(sent, timeout=DEADLINE)
        except BaseException:
            planner.kill()
            raise
        finally:
            future.ended()
            _planners.discard(planner.pid)
    if planner.returncode:
        raise subprocess.CalledProcessError(planner.returncode, command, answer, said)
    return answer


def serve(parent: int) -> None:
    """Be that process: do the job that `parent` sends, and send back what came of it."""
    _end_with(parent)
    job: Callable[[], object] = pickle.load(sys.stdin.buffer)
    answer: tuple[object, Exception | None]
    try:
        answer = (job(), None)
    except Exception as error:
        answer = (None, error)
    pickle.dump(answer, sys.stdout.buffer)


def _end_with(parent: int) -> None:
    """Have the kernel end this process with the thread that started it, which waits for it as long as it lives."""
    try:
        prctl = ctypes.CDLL(None).prctl
    except (AttributeError, OSError, TypeError):  # not Linux: it ends once its job is done
        return
    prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # who had gone by then, and whose end nobody will be told of
        os._exit(1)
