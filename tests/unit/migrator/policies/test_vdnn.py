from __future__ import annotations

from tests.unit.migrator.policies.worked import LINKS, moves, worked
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.policies import POLICIES

TRACE = worked([16] * 6, kinds=("Conv2d", "ReLU", "Conv2d", "MaxPool2d", "Linear", "Softmax"))
"""Layers a to f. Backward enters f at position 6, e at 7, d at 8, c at 9, b at 10, a at 11."""


def test_vdnn_all_by_hand() -> None:
    """MICRO'16: what is offloaded is in III-C, what is prefetched in III-B.

    b and f work in place; e is the last layer besides them; so a, c and d are offloaded. Prefetches::

        entering f   the nearest layer that waits is d                        d at 6
        entering e   c, itself a convolution, is the furthest to be looked at  c at 7
        entering d   c has been prefetched, and is a convolution: stop
        entering c   a                                                         a at 9
    """
    assert moves(POLICIES["vdnn-all"](TRACE, 100 * MiB, LINKS)) == {"d": 6, "c": 7, "a": 9}


def test_vdnn_all_has_what_is_offloaded_leave_before_the_next_layer_runs() -> None:
    """III-B: at each layer, what stays so far (b, then e, then f), and 16 MiB for what is about to leave."""
    limits = POLICIES["vdnn-all"](TRACE, 100 * MiB, LINKS).limits
    assert [limits[f"{layer}:0"][0] // MiB for layer in "abcdef"] == [16, 32, 32, 32, 48, 64]


def test_vdnn_conv_by_hand() -> None:
    """a and c. Entering f finds c; entering e and d stops at c, which is prefetched; entering c finds a."""
    assert moves(POLICIES["vdnn-conv"](TRACE, 100 * MiB, LINKS)) == {"c": 6, "a": 9}


def test_vdnn_dyn_by_hand() -> None:
    """III-C: the first that fits.

    None takes 96 MiB. With conv a is away from the third stretch to its prefetch and c from the fifth to its own,
    after which, with f still in use, all but a lie in HBM: 80 MiB. With all a, c and d are away in turn; when d and
    then c are back, 64 MiB lie there. Two groups of a sixteenth of the budget each come on top of it.
    """
    chosen = [moves(POLICIES["vdnn-dyn"](TRACE, budget * MiB, LINKS)).keys() for budget in (96, 95, 78, 10)]
    assert chosen == [set(), {"a", "c"}, {"a", "c", "d"}, {"a", "c", "d"}]


def test_vdnnpp_moves_what_vdnn_dyn_moves_and_does_not_wait_for_it() -> None:
    """IPDPS'19: the same offloads and prefetches, but HBM is released only when the room is needed."""
    plain, asynchronous = (POLICIES[name](TRACE, 78 * MiB, LINKS) for name in ("vdnn-dyn", "vdnn++"))
    assert moves(asynchronous) == moves(plain) == {"d": 6, "c": 7, "a": 9}
    assert (asynchronous.limits, asynchronous.room) == ({}, 78 * MiB)
