"""A stored group whose bytes are changed in its block, as optimizer state is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from unittest import mock

import pytest

from tests.unit.by_hand import HandStore
from torch_tiers.allocator.errors import StoreError
from torch_tiers.allocator.host.dram import DramArena
from torch_tiers.allocator.nvme.requests import RequestPool
from torch_tiers.allocator.sizes import PAGE
from torch_tiers.migrator.offload.backing import Backing
from torch_tiers.migrator.offload.stored import StoredGroup
from torch_tiers.migrator.streams.host import HostEvent
from torch_tiers.migrator.telemetry.counters import Counters


class Places:
    """DRAM for four groups of a page, and a store."""

    def __init__(self) -> None:
        self.arena = DramArena(4 * PAGE, pinned=False, step=4 * PAGE)
        self.store = HandStore(16 * PAGE)
        self.backing = Backing(self.arena, self.store, Counters())  # type: ignore[arg-type]

    def on_nvme(self, value: int) -> StoredGroup:
        """A group with bytes of this value, which is being written."""
        stored = self.backing.new(PAGE, 0, "nvme")
        assert stored.block is not None
        stored.block.tensor.fill_(value)
        self.filled(stored)
        return stored

    def filled(self, stored: StoredGroup) -> None:
        stored.filled = HostEvent()
        stored.filled.set()
        self.backing.filled(stored)

    def value(self, stored: StoredGroup) -> int:
        seen = list[int]()

        def copy(block: object) -> HostEvent:
            seen.append(int(stored.block.tensor[-1]))  # type: ignore[union-attr]
            event = HostEvent()
            event.set()
            return event

        self.backing.lend(stored, copy)
        return seen[0]


@pytest.fixture
def places() -> Iterator[Places]:
    made = Places()
    yield made
    made.store.finish()
    made.backing.close()
    made.arena.close()


def test_what_was_changed_comes_back_and_the_extent_before_is_free(places: Places) -> None:
    places.store.finish()
    stored = places.on_nvme(3)
    for value in range(4, 8):
        block = places.backing.take(stored)
        assert int(block.tensor[0]) == value - 1
        block.tensor.fill_(value)
        places.filled(stored)
        others = [places.on_nvme(0) for _ in range(6)]  # for which it has to leave
        assert places.value(stored) == value
        for other in others:
            places.backing.drop(other)
    places.backing.drop(stored)
    places.backing.close()
    assert places.store.used == 0


def test_a_block_that_was_taken_is_nobody_elses(places: Places) -> None:
    places.store.finish()
    taken = places.on_nvme(3)
    block = places.backing.take(taken)
    for _ in range(8):
        places.on_nvme(9)
    assert taken.block is block
    assert int(block.tensor[0]) == 3


def test_a_group_that_is_being_written_is_taken_when_that_is_over(places: Places) -> None:
    stored = places.on_nvme(3)
    while not places.store.writes:  # it has begun: what has not is left undone
        pass
    done = threading.Event()

    def take() -> None:
        places.backing.take(stored).tensor.fill_(4)
        done.set()

    thread = threading.Thread(target=take)
    thread.start()
    assert not done.wait(0.2)
    places.store.finish()
    assert done.wait(10)
    thread.join()
    assert places.store.used == PAGE, "nobody else takes its place meanwhile"
    places.filled(stored)
    assert places.value(stored) == 4


def test_a_block_whose_write_ends_while_it_is_lent_is_freed_once(places: Places) -> None:
    """Freed a second time it was that of the next read, which then was somebody else's."""
    stored = places.on_nvme(3)

    def copy(block: object) -> HostEvent:
        places.store.finish()
        assert stored.writing is not None
        stored.writing.result()
        event = HostEvent()
        event.set()
        return event

    places.backing.lend(stored, copy, keep=False)
    places.backing.read_ahead(stored)
    block = stored.block
    assert block is not None
    places.on_nvme(9)
    assert stored.block is block
    assert places.value(stored) == 3


def test_a_read_that_failed_is_tried_again_by_who_comes_next(places: Places) -> None:
    places.store.finish()
    stored = places.on_nvme(3)
    others = [places.on_nvme(0) for _ in range(6)]  # for which it leaves DRAM
    plain = places.store.read

    def refused(*how: object) -> Future[None]:
        failed: Future[None] = Future()
        failed.set_exception(StoreError(Path("here"), 0, PAGE, "read", "no answer"))
        return failed

    places.store.read = refused  # type: ignore[method-assign]
    with pytest.raises(StoreError):
        places.value(stored)
    places.store.read = plain  # type: ignore[method-assign]
    assert places.value(stored) == 3
    assert all(places.value(other) == 0 for other in others)


@pytest.mark.parametrize("what", ["read", "write"])
def test_what_is_interrupted_as_it_is_queued_touches_nobodys_memory_later(what: str, places: Places) -> None:
    """The request was carried out with the next one, into a block that was somebody else's by then."""
    places.store.finish()
    stored = places.on_nvme(3)
    for _ in range(6):
        places.on_nvme(0)
    goes = places.backing.new(PAGE, 0, "nvme")

    def interrupted(pool: RequestPool, request: Callable[[], None]) -> None:
        queued.append(request)
        raise KeyboardInterrupt

    queued = list[Callable[[], None]]()
    with mock.patch.object(RequestPool, what, interrupted), pytest.raises(KeyboardInterrupt):
        if what == "read":
            places.value(stored)
        else:
            places.filled(goes)
    places.backing.drop(goes)
    all_of_dram = [places.backing.new(PAGE, 0, "nvme") for _ in range(4)]  # what is being written is over then
    blocks = [group.block.tensor.fill_(7) for group in all_of_dram if group.block is not None]
    asked = len(places.store.reads), len(places.store.writes)
    for request in queued:
        request()  # as the pool does with the next one
    assert (len(places.store.reads), len(places.store.writes)) == asked
    assert len(blocks) == 4 and all(int(block.min()) == int(block.max()) == 7 for block in blocks)
    for group in all_of_dram:
        places.backing.drop(group)
    assert places.value(stored) == 3
