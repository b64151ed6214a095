"""What is copied when, and what each copy waits for: on streams and lanes that only take notes."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_tiers.migrator.weights.streamer import IN_PLACE, Streamer
from torch_tiers.migrator.weights.weight import Weight

NBYTES = 1024
BUFFER = 3 * NBYTES


class Mark(NamedTuple):
    stream: Any
    number: int

    def synchronize(self) -> None:
        pass


class Copied(str):
    """The event of a copy."""

    copies: Copies

    def query(self) -> bool:
        return self.copies.passed

    def synchronize(self) -> None:
        pass


@dataclass
class Streams:
    """The program's streams: an event is a stream and how many marks it had by then."""

    now: Any = "main"
    marks: int = 0
    waits: list[tuple[str, Any]] = field(default_factory=list)
    is_capturing: bool = False
    fails: bool = False

    def stream(self) -> Any:
        return self.now

    def mark(self, stream: Any) -> Any:
        self.marks += 1
        return Mark(stream, self.marks)

    def wait(self, event: Any, cause: str, stream: Any) -> None:
        assert cause == "weights"
        if self.fails:
            raise KeyboardInterrupt
        self.waits.append((event, stream))

    def capturing(self) -> bool:
        return self.is_capturing


@dataclass
class Copies:
    """A lane: of each copy its place in the buffer, the storage, and what it waits for."""

    made: list[tuple[int, int, list[Any]]] = field(default_factory=list)
    closed: bool = False
    passed: bool = True

    def copy(self, pieces: Sequence[Any], after: Sequence[Any], behind: Any = None) -> str:
        (piece,) = pieces
        self.made.append((piece.at, piece.source._cdata, list(after)))
        event = Copied(f"copy {len(self.made)}")
        event.copies = self
        return event

    def close(self) -> None:
        self.closed = True


class Asked:
    """Substitutes that ask when a test says so."""

    made: ClassVar[list[Asked]] = []

    def __init__(self, ask: Any, buffer: torch.Tensor) -> None:
        self.made.append(self)
        self.ask = ask
        self.reading: list[int] = []
        self.writers: dict[int, list[Any]] = {}
        self.tensors: Sequence[torch.Tensor] = ()

    def include_thread(self) -> None:
        pass

    def set(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors

    def close(self) -> None:
        pass

    def renew(self, number: int) -> list[Any]:
        return self.writers.pop(number, [])

    def readers(self, number: int) -> int:
        return self.reading.count(number)


class Rig:
    def __init__(self, weights: int = 6) -> None:
        self.streams, self.copies = Streams(), Copies()
        self.tensors = [torch.zeros(NBYTES, dtype=torch.uint8) for _ in range(weights)]
        buffer = torch.zeros(BUFFER, dtype=torch.uint8)
        self.streamer = Streamer(self.streams, self.copies, Asked, buffer)  # type: ignore[arg-type]
        self.stream(self.tensors)

    def stream(self, tensors: Sequence[torch.Tensor]) -> None:
        self.streamer.set_weights([(Weight(tensor), tensor) for tensor in tensors])
        self.asked = Asked.made[-1]

    def read(self, number: int, *, written: bool = False) -> int:
        """An operator reads a weight, and has been launched when this returns."""
        self.asked.reading.append(number)
        at: int = self.asked.ask(number, written)
        self.asked.reading.remove(number)
        return at

    def run(self, *numbers: int, kind: str = "step") -> list[int]:
        """A pass that reads these; which were copied in it, in that order."""
        before = len(self.copies.made)
        self.streamer.begin(kind)
        self.streamer.open()
        for number in numbers:
            assert self.read(number) != IN_PLACE
        self.streamer.close()
        return self.copied(before)

    def copied(self, since: int = 0) -> list[int]:
        known = {tensor.untyped_storage()._cdata: number for number, tensor in enumerate(self.tensors)}
        return [known[storage] for _, storage, _ in self.copies.made[since:]]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_in_the_first_pass_a_weight_is_copied_when_it_is_read(rig: Rig) -> None:
    assert rig.run(0, 1, 2, 3) == [0, 1, 2, 3]


def test_in_later_passes_weights_are_copied_ahead_as_far_as_there_is_room(rig: Rig) -> None:
    rig.run(0, 1, 2, 3, 4)
    rig.streamer.begin("step")
    rig.streamer.open()
    before = len(rig.copies.made)
    assert before == 5 + 3  # the buffer holds three
    rig.read(0)
    assert rig.copied(before) == []  # the operator that reads it is not launched yet
    rig.read(1)
    assert rig.copied(before) == [3]


def test_what_is_read_last_in_forward_is_there_when_backward_begins(rig: Rig) -> None:
    """What is needed last is given up first."""
    rig.run(0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0)
    assert rig.run(0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0) == [0, 1, 2, 3, 4, 5, 2, 1, 0]


def test_a_copy_goes_where_another_was_once_its_readers_are_through(rig: Rig) -> None:
    rig.run(0, 1, 2)
    rig.streamer.begin("step")
    rig.streamer.open()
    rig.read(0)
    rig.streams.now = "side"
    rig.read(0)
    rig.streams.now = "main"
    rig.read(3)
    _, _, after = rig.copies.made[-1]
    assert {stream for stream, _ in after} == {"main", "side"}


def test_a_copy_waits_for_what_the_stream_was_given_before_the_pass(rig: Rig) -> None:
    """Such as the optimizer that wrote the weights."""
    marks = rig.streams.marks
    rig.streamer.open()
    rig.read(0)
    assert ("main", marks + 1) in rig.copies.made[-1][2]


def test_a_copy_waits_for_the_streams_on_which_operators_wrote_the_weight(rig: Rig) -> None:
    rig.streamer.open()
    rig.asked.writers[1] = ["side"]
    rig.read(1)
    assert "side" in {stream for stream, _ in rig.copies.made[-1][2]}


def test_each_stream_that_reads_a_copy_waits_for_it_once(rig: Rig) -> None:
    rig.streamer.open()
    rig.read(0)
    rig.read(0)
    rig.streams.now = "side"
    rig.read(0)
    assert rig.streams.waits == [("copy 1", "main"), ("copy 1", "side")]


def test_a_weight_that_was_written_is_copied_anew(rig: Rig) -> None:
    rig.streamer.open()
    rig.read(0)
    rig.read(0, written=True)
    assert rig.copied() == [0, 0]


def test_what_an_operator_reads_is_not_given_up(rig: Rig) -> None:
    """It was asked for, and may not have been launched yet: in another thread, or with two weights."""
    rig.streamer.open()
    rig.asked.reading += [0, 1, 2]
    places = {rig.read(number) for number in (0, 1, 2)}
    assert len(places) == 3
    assert rig.read(3) == IN_PLACE
    assert rig.read(0, written=True) == IN_PLACE
    rig.asked.reading.clear()
    assert rig.read(3) != IN_PLACE


def test_copies_are_good_until_the_pass_is_closed(rig: Rig) -> None:
    """Between passes anybody may write weights, by what is no operator."""
    rig.run(0)
    assert rig.read(0) == IN_PLACE
    assert rig.run(0) == [0]


def test_a_copy_that_is_read_while_its_pass_is_closed_serves_nobody_after_it(rig: Rig) -> None:
    rig.streamer.open()
    rig.asked.reading.append(0)
    rig.read(0)
    rig.streamer.close()
    rig.streamer.open()
    assert rig.read(0) == IN_PLACE
    rig.asked.reading.clear()
    assert rig.read(0) != IN_PLACE


def test_nothing_is_copied_while_a_graph_is_captured(rig: Rig) -> None:
    rig.streamer.open()
    rig.streams.is_capturing = True
    assert rig.read(0) == IN_PLACE


def test_a_weight_whose_memory_is_another_by_now_is_read_where_it_lies(rig: Rig) -> None:
    rig.tensors[0].untyped_storage().resize_(2 * NBYTES)
    rig.streamer.open()
    assert rig.read(0) == IN_PLACE


def test_a_weight_that_the_buffer_does_not_hold_is_not_streamed() -> None:
    rig = Rig()
    large = torch.zeros(BUFFER + 1, dtype=torch.uint8)
    rig.stream([large, rig.tensors[0]])
    assert [tensor.numel() for tensor in rig.asked.tensors] == [NBYTES]


def test_at_the_end_nothing_is_asked_for_any_more(rig: Rig) -> None:
    rig.run(0)
    rig.streamer.end()
    assert not Asked.made[-1].tensors
    assert rig.copies.closed


def test_numbers_of_an_earlier_choice_mean_no_weights_of_a_later_one(rig: Rig) -> None:
    """Who asks may have looked its number up before the choice changed."""
    rig.streamer.open()
    before = rig.asked
    rig.stream(rig.tensors[3:])
    rig.streamer.open()
    assert before.ask(0, False) == IN_PLACE
    assert rig.copied() == []


def test_what_an_operator_reads_stays_while_the_choice_changes(rig: Rig) -> None:
    rig.streamer.open()
    before = rig.asked
    before.reading.append(0)
    at = rig.read(0)
    rig.stream(rig.tensors[1:])
    rig.streamer.open()
    assert at not in {rig.read(number) for number in range(3)}
    before.reading.clear()
    assert {rig.read(number) for number in range(5)} >= {at}


def test_a_signal_s_handler_that_runs_a_model_meanwhile_gets_no_copies(rig: Rig) -> None:
    seen = []

    def copy(*arguments: Any) -> str:
        rig.streamer.close()
        rig.streamer.open()
        seen.append(rig.asked.ask(1, False))
        return "copy"

    rig.copies.copy = copy  # type: ignore[method-assign,assignment]
    rig.streamer.open()
    assert rig.read(0) != IN_PLACE
    assert seen == [IN_PLACE]


def test_after_an_interrupt_weights_are_read_where_they_lie_until_the_next_pass(rig: Rig) -> None:
    rig.streamer.open()
    rig.read(0)
    rig.streams.fails = True
    with pytest.raises(KeyboardInterrupt):
        rig.read(1)
    rig.streams.fails = False
    assert rig.read(0) == rig.read(1) == IN_PLACE
    rig.asked.reading.append(0)
    rig.streamer.close()
    rig.streamer.open()
    assert rig.read(1) == IN_PLACE  # an operator is reading the buffer
    rig.asked.reading.clear()
    rig.streamer.open()
    assert len({rig.read(number) for number in range(3)} - {IN_PLACE}) == 3  # all of its room is there


def test_copies_are_good_no_longer_than_the_frame_lives_that_they_were_made_for(rig: Rig) -> None:
    """An interrupt may keep the end of a forward from us, and what NumPy writes after it is never told."""

    class Frame:
        pass

    frame = Frame()
    rig.streamer.open(frame)
    assert rig.read(0) != IN_PLACE
    del frame
    assert rig.read(0) == IN_PLACE
    another = Frame()
    rig.streamer.open(another)
    assert rig.read(0) != IN_PLACE
    assert rig.copied() == [0, 0]


def test_the_memory_of_a_weight_stays_until_it_was_copied(rig: Rig) -> None:
    rig.copies.passed = False
    rig.streamer.open()
    rig.read(0)
    storage = StorageWeakRef(rig.tensors[0].untyped_storage())
    rig.tensors.clear()
    rig.asked.tensors = ()
    gc.collect()
    rig.streamer.close()
    assert not storage.expired()
    rig.streamer.open()
    rig.copies.passed = True
    rig.streamer.close()
    gc.collect()
    assert storage.expired()


def test_the_memory_of_weights_goes_with_their_model(rig: Rig) -> None:
    """Another model may be loaded next, for which there has to be room."""
    rig.copies.passed = False
    rig.streamer.open()
    rig.read(0)
    rig.streamer.close()
    storage = StorageWeakRef(rig.tensors[0].untyped_storage())
    rig.tensors.clear()
    rig.asked.tensors = ()
    rig.streamer.drain()
    gc.collect()
    assert storage.expired()
