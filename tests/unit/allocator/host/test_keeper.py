"""What looks after an arena in the background goes on, whatever happens."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from tests.unit.by_hand import eventually
from torch_tiers.allocator.host import keeper
from torch_tiers.allocator.host.keeper import Keeper


class Owner:
    """Its `tend` raises what it is told to."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.looks = 0
        self.closed = False
        self.keeper = Keeper(self.tend)

    def tend(self) -> float | None:
        self.looks += 1
        if self.errors:
            raise self.errors.pop()
        return None if self.closed else 0.001

    def close(self) -> None:
        self.closed = True
        self.keeper.join()


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Owner]:
    monkeypatch.setattr(keeper, "AFTER_AN_ERROR", 0.001)
    owner = Owner()
    yield owner
    owner.close()


def test_an_error_is_said_once_and_does_not_end_it(owner: Owner, caplog: pytest.LogCaptureFixture) -> None:
    owner.errors = [RuntimeError("can't start new thread"), ValueError("another")]
    owner.keeper.wake()
    assert eventually(lambda: owner.looks > 5)
    assert [record.getMessage() for record in caplog.records] == [
        "dram is looked after again in 0.0 s: ValueError: another"
    ]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_keeper_that_is_dead_is_started_again(owner: Owner) -> None:
    owner.errors = [SystemExit()]
    owner.keeper.wake()
    assert owner.keeper._thread is not None
    owner.keeper._thread.join()
    looks = owner.looks
    owner.keeper.wake()
    assert eventually(lambda: owner.looks > looks)


def test_where_no_thread_can_be_had_it_starts_later(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        owner.keeper.wake()
    owner.keeper.wake()
    assert eventually(lambda: owner.looks > 0)


def test_a_keeper_that_was_ended_stays_so(owner: Owner) -> None:
    owner.keeper.wake()
    owner.close()
    looks = owner.looks
    owner.keeper.wake()
    assert not (owner.keeper._thread and owner.keeper._thread.is_alive())
    assert owner.looks == looks


@pytest.mark.filterwarnings("default:.* is multi-threaded, use of fork")
def test_a_forked_child_does_not_look_after_what_is_its_parents(owner: Owner) -> None:
    owner.keeper.wake()
    if (child := os.fork()) == 0:
        owner.keeper.wake()
        os._exit(0 if threading.active_count() == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
