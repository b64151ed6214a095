"""Decides whether two iterations are of one kind, and whether one is of a kind that has plans. Pure functions.

Programs alternate between kinds of iterations, as a GAN does; others are new in every iteration, by routing or shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_tiers.migrator.model.trace import Trace

CONSIDERABLE = 1 / 8
"""Of an iteration's sites, or of its saved bytes: one with more that another lacks is of another kind."""


def are_of_one_kind(one: Trace, other: Trace) -> bool:
    """Return whether neither trace has a considerable part that the other lacks."""
    return max(one.part_besides(other), other.part_besides(one)) <= CONSIDERABLE


def is_of_no_kind(traces: Sequence[Trace], unforeseen: tuple[int, int], lacking: int) -> bool:
    """Return whether a considerable part of an iteration was not as its plans expect.

    Parameters
    ----------
    traces
        What there are plans for.
    unforeseen
        Tensors that no plan knows, and their bytes that were not saved before.
    lacking
        Sites that were expected, and not saved.
    """
    sites = max((len(trace.sites) for trace in traces), default=0)
    nbytes = max((trace.saved_bytes for trace in traces), default=0)
    tensors, more = unforeseen
    return tensors + lacking > CONSIDERABLE * sites or more > CONSIDERABLE * nbytes


def is_of_another_size(saved: int, planned: int) -> bool:
    """Return whether groups have considerably more or fewer bytes than planned."""
    return abs(saved - planned) > CONSIDERABLE * planned
