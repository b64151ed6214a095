"""Planning beside the program: a thread that computes while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(job: Callable[[], T]) -> Future[T]:
    """Have a thread of its own do `job`. It does not keep the process from ending."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="tiers-planner", daemon=True).start()
    return future


def at_once(job: Callable[[], T]) -> Future[T]:
    """Do `job` here and now."""
    future: Future[T] = Future()
    try:
        future.set_result(job())
    except Exception as error:
        future.set_exception(error)
    return future
