from __future__ import annotations

from tests.unit.migrator.policies.worked import LINKS, moves, worked
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.planner.decisions import Trip
from torch_tiers.migrator.planner.draft import Draft
from torch_tiers.migrator.policies import POLICIES
from torch_tiers.migrator.policies.swapadvisor import Chromosome, swaps

TRACE = worked([4] * 6, forward=4.0, backward=8.0)


def test_belady_by_hand() -> None:
    """ASPLOS'20, "Swap planning": one class with four objects.

    a, b, c and d take them. e evicts a, whose next use is furthest, and f evicts b. Backward is done with f, e, d
    and c by 7, 8, 9 and 10, and frees their objects: b may come back at 7, a at 8.
    """
    draft = Draft(TRACE, 20 * MiB, LINKS)
    assert swaps(draft, Chromosome({4 * MiB: 4 * MiB}, {4 * MiB: 4})) == {1: Trip(7), 0: Trip(8)}


def test_tensors_compete_within_their_class_only() -> None:
    """b and e have 8 MiB and share one object: e evicts b. The others have four objects, and stay.

    e is last used at 7, so b may come back at 8.
    """
    trace = worked([4, 8, 4, 4, 8, 4], forward=4.0, backward=8.0)
    chromosome = Chromosome({4 * MiB: 4 * MiB, 8 * MiB: 8 * MiB}, {4 * MiB: 4, 8 * MiB: 1})
    assert swaps(Draft(trace, 28 * MiB, LINKS), chromosome) == {1: Trip(8)}


def test_a_size_may_be_mapped_to_a_larger_class() -> None:
    """All six in a class of 8 MiB with five objects: f evicts a, which comes back when f's object is free, at 7."""
    trace = worked([4, 8, 4, 4, 8, 4], forward=4.0, backward=8.0)
    chromosome = Chromosome({4 * MiB: 8 * MiB, 8 * MiB: 8 * MiB}, {8 * MiB: 5})
    assert swaps(Draft(trace, 28 * MiB, LINKS), chromosome) == {0: Trip(7)}


def test_swapadvisor_by_hand() -> None:
    """One size, so one class: with two groups of 2 MiB set aside, 20 MiB are four objects, as in Belady's test."""
    assert moves(POLICIES["swapadvisor"](TRACE, 20 * MiB, LINKS)) == {"b": 7, "a": 8}
