"""Which iterations are recorded, and which of them count as one kind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.traces import chain
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.controller.recordings import Recordings, are_of_one_kind
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
