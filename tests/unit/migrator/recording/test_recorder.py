from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.unit.natively import built
from torch_tiers.migrator.model.trace import Site
from torch_tiers.migrator.offload.group import Group, State
from torch_tiers.migrator.recording import recorder as module
from torch_tiers.migrator.recording.recorder import PARTS, SELDOM, Recorder
from torch_tiers.migrator.recording.storages import Known, Storages
from torch_tiers.migrator.streams.meter import Measures

NBYTES = 8192


def known(storages: Storages, tensor: torch.Tensor) -> Known:
    return storages.find(tensor)


def moved(entry: Known, state: State, tensor: torch.Tensor | None = None) -> Known:
    """As if the engine had taken it; `tensor` is what a group holds that is not away."""
    entry.saved = built().Saved(Group(0, 0, state), torch.empty(0) if tensor is None else tensor, 0, NBYTES)
    return entry


def tensor(nbytes: int = NBYTES) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def nbytes_of(recorder: Recorder) -> dict[str, int]:
    return {site.key: site.nbytes for site in recorder.trace().sites}


def test_saves_and_uses_are_positions_of_one_order() -> None:
    recorder, storages, x, y = Recorder(set()), built().Storages(), tensor(), tensor(2 * NBYTES)
    first, second = recorder.save("a:0", known(storages, x)), recorder.save("b:0", known(storages, y))
    assert first and second
    second.used()
    first.used()
    second.used()
    trace = recorder.trace()
    assert trace.positions == 5
    assert trace.sites == (Site("a:0", 0, NBYTES, 0, (3,)), Site("b:0", 1, 2 * NBYTES, 1, (2, 4)))


def test_sites_on_one_storage_share_its_number() -> None:
    recorder, storages, x = Recorder(set()), built().Storages(), tensor()
    recorder.save("a:0", known(storages, x))
    recorder.save("b:0", known(storages, x))
    assert recorder.trace().saved_bytes == NBYTES


def test_what_cannot_move_has_no_bytes_and_a_number_of_its_own() -> None:
    recorder = Recorder(set())
    recorder.save("a:0", None)
    recorder.save("a:1", None)
    one, other = recorder.trace().sites
    assert (one.nbytes, other.nbytes) == (0, 0)
    assert one.storage != other.storage


def test_what_the_program_itself_keeps_is_not_worth_moving() -> None:
    outlived: set[str] = set()
    recorder, storages, logits = Recorder(outlived), built().Storages(), tensor()
    recorder.save("loss:0", moved(known(storages, logits), State.AWAY))
    recorder.turn()
    assert nbytes_of(recorder) == {"loss:0": 0}
    later = Recorder(outlived)
    later.save("loss:0", known(built().Storages(), logits))
    assert nbytes_of(later) == {"loss:0": 0}


def test_what_the_program_kept_as_its_backward_began_is_not_worth_moving_though_it_is_gone_as_another_begins() -> None:
    recorder, storages, logits = Recorder(set()), built().Storages(), tensor()
    recorder.save("loss:0", moved(known(storages, logits), State.AWAY))
    recorder.turn()
    del logits
    recorder.save("loss:1", None)
    recorder.turn()
    assert nbytes_of(recorder) == {"loss:0": 0, "loss:1": 0}


def test_a_tensor_waits_for_backward_until_that_asks_for_it_or_no_graph_holds_it() -> None:
    recorder = Recorder(set())
    used, dead, waits = (recorder.save(f"Net.fc:{k}", None) for k in range(3))
    assert used and waits
    recorder.turn()
    used.used()
    del dead
    assert (recorder.first_module, recorder.saved, recorder.waited, recorder.waiting()) == ("Net.fc", 3, 3, 1)


def test_what_only_backward_needs_is_worth_moving() -> None:
    recorder, x = Recorder(set()), tensor()
    recorder.save("a:0", moved(known(built().Storages(), x), State.AWAY))
    del x
    recorder.turn()
    assert nbytes_of(recorder) == {"a:0": NBYTES}


@pytest.mark.parametrize("state", [State.FILLING, State.LEAVING])
@pytest.mark.parametrize("kept", [False, True])
def test_of_what_its_group_holds_it_is_seen_whether_the_program_does(state: State, *, kept: bool) -> None:
    recorder, x = Recorder(set()), tensor()
    recorder.save("a:0", moved(known(built().Storages(), x), state, x))
    if not kept:
        del x
    recorder.turn()
    assert nbytes_of(recorder) == {"a:0": 0 if kept else NBYTES}


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_stays_is_not_judged(*, elsewhere: bool) -> None:
    """The graph holds it, and nobody counts how often; also where another site has it moved."""
    recorder, storages, x = Recorder(set()), built().Storages(), tensor()
    recorder.save("a:0", known(storages, x), stays=True)
    if elsewhere:
        recorder.save("b:0", moved(known(storages, x), State.FILLING, x))
    recorder.turn()
    assert set(nbytes_of(recorder).values()) == {NBYTES}


@pytest.mark.parametrize(("used", "counts"), [(False, [0, -1, -1, -1, -1]), (True, [0, -1, -1, -1, 0])])
def test_what_the_program_keeps_and_did_not_leave_counts_as_its_own_all_the_time(
    *, used: bool, counts: Sequence[int]
) -> None:
    """It counted as saved in HBM, and then was no site: it was nowhere, and plans exceeded their budget by it."""
    meter = FakeMeter()
    recorder, storages, logits = Recorder(set(), meter), built().Storages(), tensor()  # type: ignore[arg-type]
    record = recorder.save("loss:0", moved(known(storages, logits), State.FILLING, logits))
    recorder.save("loss:1", None)
    recorder.turn()
    if used and record is not None:
        record.used()
    else:
        recorder.advance()
    recorder.advance()
    assert [site.nbytes for site in recorder.trace().sites] == [0, 0]
    assert list(meter.held) == [NBYTES * count for count in counts]


def test_what_the_program_keeps_counts_as_its_own_until_it_left() -> None:
    meter = FakeMeter()
    recorder, storages, logits = Recorder(set(), meter), built().Storages(), tensor()  # type: ignore[arg-type]
    entry = moved(known(storages, logits), State.LEAVING, logits)
    recorder.save("loss:0", entry)
    recorder.save("loss:1", None)
    moved(entry, State.AWAY)
    recorder.save("loss:2", None)
    recorder.save("loss:3", None)
    recorder.turn()
    recorder.trace()
    assert list(meter.held) == [0, -NBYTES, 0, 0, 0]


def test_what_is_held_until_the_next_save_alone_is_not_told() -> None:
    recorder, storages, x = Recorder(set(), FakeMeter()), built().Storages(), tensor()  # type: ignore[arg-type]
    recorder.save("a:0", moved(known(storages, x), State.FILLING, x))
    del x
    recorder.save("b:0", None)
    recorder.turn()
    assert not recorder.trace().held


@pytest.mark.parametrize("kept", [False, True])
def test_a_part_that_our_own_group_holds_is_not_the_program_s(*, kept: bool) -> None:
    recorder, storages, qkv = Recorder(set()), built().Storages(), tensor(3 * NBYTES)
    q, k, _ = qkv.chunk(3)
    recorder.save("q:0", moved(known(storages, q), State.AWAY))
    recorder.save("k:0", moved(known(storages, k), State.LEAVING, k))  # holds the whole storage
    del q, k, _
    if not kept:
        del qkv
    recorder.turn()
    assert nbytes_of(recorder) == {"q:0": 0 if kept else NBYTES, "k:0": 0 if kept else NBYTES}


def test_of_many_parts_of_a_storage_nothing_is_said_that_would_take_long() -> None:
    recorder, storages, whole = Recorder(set(), FakeMeter()), built().Storages(), tensor(PARTS * NBYTES)  # type: ignore[arg-type]
    for k, part in enumerate(whole.detach().chunk(PARTS)):
        recorder.save(f"a:{k}", moved(storages.find(part.data), State.LEAVING, part))
    recorder.turn()
    assert not any(site.nbytes == 0 for site in recorder.trace().sites)


def test_an_iteration_that_never_ends_is_not_recorded_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT", 3)
    recorder = Recorder(set())
    assert [recorder.save(f"a:{k}", None) is None for k in range(5)] == [False, False, False, True, True]
    assert len(recorder.trace().sites) == 3


class FakeMeter:
    """Remembers what it is told about memory."""

    def __init__(self) -> None:
        self.held: Sequence[int] = ()

    def tick(self, resident: int) -> None:
        pass

    def finish(self, resident: int, held: Sequence[int]) -> Measures:
        self.held = held
        return Measures((), 0.0, ())


def test_what_left_and_is_still_held_by_the_program_counts_as_saved_until_that_is_over() -> None:
    meter = FakeMeter()
    recorder, storages, logits = Recorder(set(), meter), built().Storages(), tensor()  # type: ignore[arg-type]
    recorder.save("loss:0", moved(known(storages, logits), State.AWAY))
    recorder.save("loss:1", None)
    del logits
    recorder.save("loss:2", None)
    recorder.turn()
    trace = recorder.trace()
    assert meter.held == [0, NBYTES, 0, 0]
    assert trace.held == {trace.sites[0].storage: 2}


def test_what_stays_in_hbm_for_now_and_is_held_by_the_program_is_seen_as_well() -> None:
    """Where there is room nothing leaves while an iteration is recorded; the plan may move it all the same."""
    meter = FakeMeter()
    recorder, storages, logits = Recorder(set(), meter), built().Storages(), tensor()  # type: ignore[arg-type]
    recorder.save("loss:0", moved(known(storages, logits), State.FILLING, logits))
    recorder.save("loss:1", None)
    recorder.save("loss:2", None)
    del logits
    recorder.save("loss:3", None)
    recorder.turn()
    trace = recorder.trace()
    assert meter.held == [0, 0, 0, 0, 0]  # it counts as resident
    assert trace.held == {trace.sites[0].storage: 3}


def test_what_two_modules_save_is_held_once() -> None:
    """Counted twice, as much of all else in use was taken not to be there: a ResNet's plans exceeded their budget."""
    meter = FakeMeter()
    recorder, storages, shared = Recorder(set(), meter), built().Storages(), tensor()  # type: ignore[arg-type]
    recorder.save("relu:0", moved(known(storages, shared), State.AWAY))
    recorder.save("conv:0", storages.find(shared))
    recorder.save("conv:1", None)
    del shared
    recorder.save("norm:0", None)
    recorder.turn()
    recorder.trace()
    assert max(meter.held) == NBYTES


@dataclass
class Operator:
    """An operator of backward, of such a number."""

    number: int

    def _sequence_nr(self) -> int:
        return self.number


@pytest.mark.parametrize(("one_operator", "resident"), [(True, True), (False, True), (True, False)])
def test_what_an_operator_of_backward_asked_for_is_in_use_until_it_has_asked_for_all_that_it_needs(
    *, one_operator: bool, resident: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product's operands are asked for one after the other. One of 6 GiB was missing from a peak of 24."""
    meter = FakeMeter()
    recorder, storages = Recorder(set(), meter), built().Storages()  # type: ignore[arg-type]
    x, y = tensor(), tensor(2 * NBYTES)
    large = moved(known(storages, x), State.HOME)
    assert large.saved
    large.saved.group.counted = 2 * NBYTES if resident else 0
    first, second = recorder.save("mul:0", large), recorder.save("mul:1", known(storages, y))
    assert first and second
    operators = iter([1, 1 if one_operator else 2])
    monkeypatch.setattr(module, "_operator", lambda: Operator(next(operators)))
    first.used()
    second.used()
    recorder.trace()
    # Four positions: in the stretch after the last the product is computed, and the group counts as resident.
    assert meter.held == [0, 0, 0, 0, -NBYTES if one_operator and resident else 0]


def test_what_several_operators_of_backward_ask_for_is_in_use_beside_the_last_of_them_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a product of two layers of the same input: backward runs in the other order than tensors were saved in."""
    meter = FakeMeter()
    recorder, storages = Recorder(set(), meter), built().Storages()  # type: ignore[arg-type]
    x, y = tensor(), tensor(2 * NBYTES)
    shared, other = moved(known(storages, x), State.HOME), known(storages, y)
    assert shared.saved
    shared.saved.group.counted = NBYTES
    saved = [recorder.save(f"net:{k}", each) for k, each in enumerate((shared, other, shared, other))]
    operators = iter([2, 2, 1, 1])
    monkeypatch.setattr(module, "_operator", lambda: Operator(next(operators)))
    for record in (saved[2], saved[3], saved[0], saved[1]):
        assert record
        record.used()
    recorder.trace()
    assert meter.held == [0] * 8 + [-NBYTES], "in the first product it counts as in use already"


def test_a_recording_holds_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that backward left whole was held for ever: with its leaves, the recorder itself."""
    recorder, operator = Recorder(set(), FakeMeter()), Operator(1)  # type: ignore[arg-type]
    record = recorder.save("a:0", known(built().Storages(), tensor()))
    assert record
    monkeypatch.setattr(module, "_operator", lambda: operator)
    before = sys.getrefcount(operator)
    record.used()
    assert sys.getrefcount(operator) == before


class Looked:
    """A storage that is known, and counts how often somebody looks which it is."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self.looks = 0

    @property
    def cdata(self) -> int:
        self.looks += 1
        return self._known.cdata

    def __getattr__(self, name: str) -> Any:
        return getattr(self._known, name)


def test_what_the_program_holds_for_long_is_looked_at_ever_more_rarely() -> None:
    meter = FakeMeter()
    recorder, storages, logits = Recorder(set(), meter), built().Storages(), tensor()  # type: ignore[arg-type]
    saved: Any = Looked(moved(known(storages, logits), State.AWAY))
    recorder.save("loss:0", saved)
    at_once = saved.looks
    for k in range(1, 1000):
        recorder.save(f"loss:{k}", None)
    assert at_once < saved.looks < 300
    del logits
    recorder.turn()
    recorder.trace()
    assert meter.held[:900] == [0, *[NBYTES] * 899]


def test_what_ended_since_the_last_look_is_taken_to_have_ended_halfway() -> None:
    meter = FakeMeter()
    recorder, storages, logits = Recorder(set(), meter), built().Storages(), tensor()  # type: ignore[arg-type]
    recorder.save("loss:0", moved(known(storages, logits), State.AWAY))
    for k in range(1, 100):
        recorder.save(f"loss:{k}", None)
    del logits
    for k in range(100, 120):
        recorder.save(f"loss:{k}", None)
    recorder.turn()
    recorder.trace()
    held = sum(map(bool, meter.held))
    assert 99 - 99 // SELDOM <= held <= 99 + 99 // SELDOM


def test_what_the_program_keeps_into_backward_is_its_own() -> None:
    meter = FakeMeter()
    recorder, storages, images = Recorder(set(), meter), built().Storages(), tensor()  # type: ignore[arg-type]
    recorder.save("stem:0", moved(known(storages, images), State.AWAY))
    recorder.save("stem:1", None)
    recorder.turn()
    recorder.trace()
    assert meter.held == [0, 0, 0]
