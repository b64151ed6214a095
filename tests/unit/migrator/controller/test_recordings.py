"""Which iterations are recorded, and which of them count as one kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.unit.traces import chain
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.controller.kinds import are_of_one_kind
from torch_tiers.migrator.controller.recordings import Recordings
from torch_tiers.migrator.model.trace import Trace


def layers(sizes: dict[str, int]) -> Trace:
    """An iteration that saves so many MiB at each site."""
    trace = chain([nbytes * MiB for nbytes in sizes.values()])
    sites = tuple(replace(site, key=key) for site, key in zip(trace.sites, sizes, strict=True))
    return replace(trace, sites=sites)


def recorded(recordings: Recordings, iterations: int, trace: Trace) -> int:
    """How many of so many iterations, each of which the plans mispredict, are recorded."""
    count = 0
    for iteration in range(2, 2 + iterations):
        if recordings.due:
            count += 1
            recordings.add(trace, iteration)
        else:
            recordings.pass_by(iteration, mispredicted=True)
    return count


def test_iterations_that_share_most_of_their_bytes_are_of_one_kind() -> None:
    usual = layers({f"expert{k}:0": 10 for k in range(16)})
    one_expert_less = layers({f"expert{k}:0": 10 for k in range(15)})
    half = layers({f"expert{k}:0": 10 for k in range(8)})
    other_sizes = layers({f"expert{k}:0": 3 * k + 1 for k in range(16)})
    assert are_of_one_kind(usual, usual)
    assert are_of_one_kind(usual, other_sizes)
    assert are_of_one_kind(usual, one_expert_less) and are_of_one_kind(one_expert_less, usual)
    assert not are_of_one_kind(usual, half) and not are_of_one_kind(half, usual)


def test_of_one_kind_the_largest_iteration_is_kept() -> None:
    small, large = layers({"a:0": 1, "b:0": 2}), layers({"a:0": 2, "b:0": 2})
    for order in ((small, large), (large, small)):
        recordings = Recordings(2)
        for iteration, trace in enumerate(order):
            recordings.add(trace, iteration)
        assert recordings.traces == (large,)


def test_other_kinds_are_kept_beside_it() -> None:
    training, generator = layers({"a:0": 1}), layers({"b:0": 1})
    recordings = Recordings(2)
    recordings.add(training, 1)
    recordings.add(generator, 2)
    assert recordings.traces == (training, generator)


@pytest.mark.parametrize(("iterations", "most"), [(30, 4), (150, 8), (700, 16)])
def test_a_program_that_is_mispredicted_in_every_iteration_is_recorded_ever_more_rarely(
    iterations: int, most: int
) -> None:
    recordings = Recordings(1)
    recordings.add(layers({"a:0": 1}), 1)
    assert 4 <= recorded(recordings, iterations, layers({"b:0": 1})) <= most


@pytest.mark.parametrize(
    ("sizes", "varies"), [((4, 4, 4, 3), False), ((4, 3, 4, 2), True), ((4,), False), ((4, 3, 3, 4, 4), False)]
)
def test_a_kind_varies_where_its_iterations_are_seldom_as_large_as_the_largest(
    sizes: tuple[int, ...], varies: bool
) -> None:
    recordings = Recordings(1)
    for iteration, nbytes in enumerate(sizes):
        recordings.add(layers({"a:0": nbytes, "b:0": 1}), iteration)
    assert recordings.varies == varies


def looks(iterations: Sequence[tuple[Trace, bool]], recordings: Recordings) -> list[int]:
    """Numbers of the iterations that are recorded of these; each tells whether it departs from the plans there are."""
    found = []
    for iteration, (trace, departs) in enumerate(iterations, 2):
        if recordings.due:
            found.append(iteration)
            recordings.add(trace, iteration)
        else:
            recordings.pass_by(iteration, mispredicted=departs)
    return found


@pytest.mark.parametrize("every", [2, 5, 16, 30])
def test_a_kind_is_recorded_however_rarely_it_comes(every: int) -> None:
    """A GAN whose generator has its turn after five steps of the critic: a look begins after it, and is soon over."""
    critic, generator = layers({"critic:0": 2}), layers({"critic:0": 2, "generator:0": 2})
    recordings = Recordings(1)
    recordings.add(critic, 1)
    turns = [(generator, True) if k % every == 0 else (critic, False) for k in range(1, 4 * every)]
    looks(turns, recordings)
    assert recordings.traces == (critic, generator)


def test_what_departs_for_no_reason_that_is_recorded_is_not_recorded_each_time() -> None:
    usual = layers({"a:0": 1})
    recordings = Recordings(1)
    recordings.add(usual, 1)
    found = looks([(usual, k % 10 == 0) for k in range(1, 400)], recordings)
    assert len(found) <= 5, "one look, and one that waited for it to come again"


def test_a_kind_that_has_been_smaller_for_long_is_planned_for_as_it_is() -> None:
    """Some samplers begin with the longest batch: all that a step saved moved for good, where all would fit."""
    large, small = layers({"a:0": 8, "b:0": 8}), layers({"a:0": 1, "b:0": 1})
    recordings = Recordings(1)
    recordings.add(large, 1)
    looks([(small, True)] * 4, recordings)
    assert recordings.traces == (large,), "it may come again"
    looks([(small, True)] * 40, recordings)
    assert recordings.traces == (small,)


def test_a_kind_that_comes_as_large_now_and_then_stays_as_large() -> None:
    large, small = layers({"a:0": 8}), layers({"a:0": 1})
    recordings = Recordings(1)
    recordings.add(large, 1)
    looks([(large if k % 3 == 0 else small, True) for k in range(700)], recordings)
    assert recordings.traces == (large,)


def test_a_pause_begins_when_there_are_plans() -> None:
    """Planning that took longer than the pause was under way in each iteration."""
    known, other = layers({"a:0": 1}), layers({"b:0": 1})
    recordings = Recordings(1)
    recordings.add(known, 1)
    assert looks([(other, True)] * 5, recordings) == [3, 4, 5, 6]
    recordings.planned(1000)
    recordings.pass_by(1001, mispredicted=True)
    assert not recordings.due


def test_what_is_learned_anew_does_not_wait_for_the_pauses_of_before() -> None:
    recordings = Recordings(1)
    recordings.add(layers({"a:0": 1}), 1)
    looks([(layers({f"b{k}:0": 1}), True) for k in range(600)], recordings)
    recordings.begin_anew()
    recordings.add(layers({"a:0": 1}), 602)
    recordings.pass_by(603, mispredicted=True)
    assert recordings.due
