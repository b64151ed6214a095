"""The actions of all sites, in the form in which the hooks look them up."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from torch_tiers.migrator.saved.actions import Action, Go, Recompute, Stay
from torch_tiers.migrator.saved.garbage import KEPT, MADE, MOVED


class Agenda:
    """The actions of all sites, by module.

    Parameters
    ----------
    actions : iterable of (str, Action)
        Sites and their actions; of two for one site the last holds.

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

    def __init__(self, actions: Iterable[tuple[str, Action]] = ()) -> None:
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
        busy.update(self._noted)
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


_TAKES = {Stay: KEPT, Go: MOVED, Recompute: MADE}


def _parted(key: str) -> tuple[str, int]:
    path, _, number = key.rpartition(":")
    return path, int(number)
