"""The actions of all sites, in the form in which the hooks look them up."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.paces import paces as paces_of
from torch_tiers.migrator.recompute.verified import Verified
from torch_tiers.migrator.saved.actions import Action, Go, Owner, Recompute, Stay
from torch_tiers.migrator.saved.garbage import KEPT, MADE, MOVED


class Agenda:
    """The actions of all sites, by module.

    Parameters
    ----------
    actions : iterable of (str, Action)
        Sites and their actions; of two for one site the last holds.
    heard : collection of str
        Further sites of which the hooks must be told.

    Attributes
    ----------
    makes : bool
        Whether anything is recomputed.
    bypass : mapping of str to bool or None
        By the path of a module, whether the hooks are switched off in it: all that it saves stays in HBM and need not
        be counted. None for modules that save nothing themselves and call others: the hooks stay as they are. Roots and
        the program outside of modules have no entry: what they save often tells that a forward or backward begins.
        Empty if the hooks are called in all modules.
    objects : int
        Python objects that the hooks hold under these plans; see `migrator.saved.garbage`.
    """

    def __init__(self, actions: Iterable[tuple[str, Action]] = (), heard: Collection[str] = ()) -> None:
        by_path: dict[str, dict[int, Action]] = {}
        for key, action in actions:
            path, number = _parted(key)
            by_path.setdefault(path, {})[number] = action
        planned = [action for of in by_path.values() for action in of.values()]
        busy = {
            path for path, of in by_path.items() if not all(type(one) is Stay and one.bypass for one in of.values())
        }
        verified = [action.verified for action in planned if isinstance(action, Recompute)]
        self.makes = bool(verified)
        self._actions = {path: [of.get(n) for n in range(max(of) + 1)] for path, of in by_path.items()}
        self._noted: dict[str, set[int]] = {}
        for key in frozenset[str]().union(*(one.found for one in verified)):
            path, number = _parted(key)
            self._noted.setdefault(path, set()).add(number)
        busy.update(self._noted, (_parted(key)[0] for key in heard))
        around = {path[:at] for path in by_path for at, letter in enumerate(path) if letter == "."}
        bypassed = {path: True for path in by_path.keys() - busy if "." in path}
        between = {path: None for path in around - busy - by_path.keys() if "." in path}
        self.bypass: Mapping[str, bool | None] = {**bypassed, **between} if bypassed else {}
        self.objects = sum(
            _TAKES[type(one)] for path in by_path.keys() - bypassed.keys() for one in by_path[path].values()
        )

    def of(self, path: str) -> Sequence[Action | None]:
        """Return the actions of a module, by number; shorter than its sites if some were not expected."""
        return self._actions.get(path, ())

    def noted(self, path: str) -> Collection[int]:
        """Return the numbers of a module's sites from which others are recomputed."""
        return self._noted.get(path, ())


def actions_of(
    owner: Owner, plans: Sequence[tuple[Plan, Trace]], verified: Mapping[str, Verified], *, nothing_moves: bool
) -> Iterator[tuple[str, Action]]:
    """Yield the action of every site that the plans know.

    A site on which plans disagree moves: that always fits.

    Parameters
    ----------
    plans
        Each with the trace that it is for.
    verified
        Replays that held, by site; what has none is not dropped.
    nothing_moves
        Whether kept tensors need not be counted: no group waits for their room.
    """
    # What one plan is to hear of is heard under all of them: which kind of iteration this is nobody knows.
    heard = set[str]().union(*(_heard(plan, trace) for plan, trace in plans))
    paced = [(plan, {} if nothing_moves else paces_of(plan, trace)) for plan, trace in plans]
    for plan, paces in paced:
        for key, keep in plan.keep.items():
            yield key, Stay(owner, keep.enter, keep.leave, paces.get(key), nothing_moves and key not in heard)
    for plan, paces in paced:
        for key in plan.recompute:
            if key in verified:
                yield key, Recompute(owner, key, verified[key], paces.get(key))
    for plan, paces in paced:
        for group in plan.groups:
            for key in group.sites:
                yield key, Go(owner, group, paces.get(key))


def _heard(plan: Plan, trace: Trace) -> set[str]:
    """Return the sites that stay in HBM but for which the hooks must be called.

    These are the site that backward asks for first, which tells that backward has begun, and the inputs of
    recomputations: the hooks detect whether the program changes them, also where PyTorch has no reason to check.
    """
    first = min((site for site in trace.sites if site.uses), key=lambda site: site.uses[0], default=None)
    recomputed = {site.storage for site in trace.sites if site.key in frozenset(plan.recompute)}
    inputs = {ident for made in recomputed for ident in trace.recipes[made].inputs}
    return {site.key for site in trace.sites if site is first or site.storage in inputs}


_TAKES = {Stay: KEPT, Go: MOVED, Recompute: MADE}


def _parted(key: str) -> tuple[str, int]:
    path, _, number = key.rpartition(":")
    return path, int(number)
