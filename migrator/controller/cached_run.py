"""Begins with the cached plans of an earlier run, verifies them, and caches what proved right for the next. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch_tiers.migrator.controller.budget import SETTLED
from torch_tiers.migrator.controller.cached_plans import CachedPlans, PlanCache
from torch_tiers.migrator.controller.feedback import Feedback
from torch_tiers.migrator.controller.in_force import PlansInForce
from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace

QUICKER = 0.2  # an iteration may be slow by chance, but none is quicker by this share: the cached times are too long


@dataclass(frozen=True)
class Verification:
    """What a recorded iteration tells of the cached plans."""

    differs: bool = False  # it is larger than in the earlier run, recomputes less, or takes much less time
    completes: bool = False  # it shows for the first time what of the cached plans can be recomputed


class CachedRun:
    """What this run has from an earlier one, and leaves to the next.

    Parameters
    ----------
    cache : PlanCache, optional
        Plans of earlier runs of the program.
    target : int
        The peak to aim for, in bytes.
    """

    def __init__(self, cache: PlanCache | None, target: int) -> None:
        self._cache = cache
        self._target = target
        self._is_stored = False  # whether the plans in force are in the cache already
        self._unseen = False  # whether no trial of this run has yet confirmed what the cached plans recompute
        self.forget()

    def forget(self) -> None:
        """Take note that all is learned anew."""
        self.resumed = False  # whether this run began with what another learned
        self._verifies = False  # whether the next recorded iteration is to tell that this is right

    def find(self, trace: Trace, links: Links, static: Callable[[], int]) -> CachedPlans | None:
        """Return the plans of an earlier run that had such an iteration, if they apply."""
        found = None if self._cache is None else self._cache.find(trace.sites)
        applies = found is not None and found.holds_for(links, static(), int(SETTLED * self._target))
        return found if applies else None

    def begun(self, plans: Iterable[Plan], trace: Trace) -> None:
        """Take note that plans which were found are in force from this iteration on."""
        self.resumed = self._verifies = self._is_stored = True
        self._unseen = not _dropped(plans) <= _obtainable(trace)

    def changed(self) -> None:
        """Take note of other plans or predictions, which are not cached."""
        self._is_stored = False

    def verify(self, in_force: PlansInForce, trace: Trace, peak: int) -> Verification:
        """Judge the plans that were found by the first whole iteration; of later ones nothing is said."""
        verifies, self._verifies = self._verifies, False
        if not verifies:
            return Verification()
        known = {key for of in in_force.traces for key in of.by_key}
        if not trace.by_key.keys() <= known:
            return Verification(completes=self._unseen)  # another kind, of which nothing was said
        most = max((each.peak() for each in in_force.planned), default=0)
        fits = peak <= max(most, self._target) + int(SETTLED * self._target)
        recomputes = _dropped(in_force.plans) & trace.by_key.keys() <= _obtainable(trace)
        same = (_computing(of) for of in in_force.traces if of.sites == trace.sites)
        is_quicker = 0 < _computing(trace) < (1 - QUICKER) * min(same, default=0.0)  # 0: it was not measured
        return Verification(differs=is_quicker or not (fits and recomputes), completes=self._unseen)

    def store(self, in_force: PlansInForce, feedback: Feedback, static: Callable[[], int]) -> bool:
        """Cache what was learned, once; return whether that was done.

        Not while others use the memory bus, who may not be there in the next run.
        """
        if self._cache is None or self._is_stored or feedback.given.contended:
            return False
        self._is_stored = True
        if any(each.least or each.refused for each in in_force.planned):
            return False  # the next run is to warn again
        found = feedback.corrections, feedback.given, static(), in_force.streamed, in_force.state
        self._cache.store(CachedPlans(in_force.recorded, in_force.plans, *found))
        return True


def _computing(trace: Trace) -> float:
    """Return the device's seconds; the host's depend on how far it is ahead, which one recording does not tell."""
    return trace.seconds if trace.clocks is None else sum(trace.clocks.device)


def _dropped(plans: Iterable[Plan]) -> set[str]:
    return {key for plan in plans for key in plan.recompute}


def _obtainable(trace: Trace) -> set[str]:
    """Return the sites whose storages were recomputed bit for bit in a trial."""
    return {site.key for site in trace.sites if site.storage in trace.recipes}
