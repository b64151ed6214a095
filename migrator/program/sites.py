"""Where in the program a tensor is saved: the path of the module that runs, and how many it saved before.

Our wrapper around `Module.__call__` keeps the path of the running module. Roots are the modules that no other module
calls, so no program has to name its model.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from typing import Generic, Protocol, TypeVar

from torch import nn

from torch_tiers.migrator.program.modules import walk

Action = TypeVar("Action")
Action_co = TypeVar("Action_co", covariant=True)


class Agenda(Protocol[Action_co]):
    """What the plans say of all sites, by module."""

    def of(self, path: str) -> Sequence[Action_co | None]:
        """The actions of a module, by number; shorter than its sites where some were not foreseen."""

    def noted(self, path: str) -> Collection[int]:
        """Numbers of a module's sites from which others are made again."""


@dataclass(eq=False, slots=True)
class Node(Generic[Action]):
    """One module, or the program outside of all modules.

    Attributes
    ----------
    path : str
        ``Root.child.grandchild``; empty for the program itself.
    kind : str
        Class of the module.
    iteration : int
        The iteration that `count` belongs to.
    count : int
        Tensors it has saved in that iteration.
    agenda : Agenda
        Where `actions` and `noted` were looked up.
    actions : sequence
        What the plan says of each, by number; shorter than the sites when some were not foreseen.
    noted : collection of int
        Numbers of those from which others are made again.
    """

    path: str
    kind: str = ""
    iteration: int = -1
    count: int = 0
    agenda: Agenda[Action] | None = None
    actions: Sequence[Action | None] = ()
    noted: Collection[int] = ()
    unnamed: dict[str, Node[Action]] = field(default_factory=dict)

    def begin(self, place: Place[Action]) -> None:
        """Come to the iteration under way."""
        self.iteration = place.iteration
        self.count = 0
        if self.agenda is not place.agenda and place.agenda is not None:
            self.agenda = place.agenda
            self.actions = place.agenda.of(self.path)
            self.noted = place.agenda.noted(self.path)


@dataclass(eq=False, slots=True)
class Place(Generic[Action]):
    """Where one thread is: all that its hooks ask before they look up what is to be done with a tensor.

    Attributes
    ----------
    here : Node
        The module it is in.
    iteration : int
        Number of the iteration under way.
    agenda : Agenda
        What the plans say of sites in that.
    recording : bool
        Whether that is recorded.
    in_backward : bool
        Whether backward has asked for something in it, and nothing was saved since.
    bypass : mapping of str to bool or None
        By the path of a module, whether the hooks need not be called there in it, until backward begins: the first
        tensor that is saved after that may be of the next. None where it may be as it is.
    """

    here: Node[Action]
    iteration: int = 0
    agenda: Agenda[Action] | None = None
    recording: bool = False
    in_backward: bool = False
    bypass: Mapping[str, bool | None] = field(default_factory=dict)


class Modules(Generic[Action]):
    """The stack of modules that one thread is in.

    Attributes
    ----------
    place : Place
        Where it is.
    stack : list of Node
        Where it was before it entered each of the modules that it is in.
    nodes : dict of int to Node
        All that are known, by the id of their module.
    """

    def __init__(self) -> None:
        self.place: Place[Action] = Place(Node(""))
        self.stack: list[Node[Action]] = []
        self.nodes: dict[int, Node[Action]] = {}
        self._roots: dict[int, weakref.ref[nn.Module]] = {}
        self._named: dict[int, weakref.ref[nn.Module]] = {}  # whose the nodes are: an id may be another's by now
        self._names: set[str] = set()

    @property
    def outside(self) -> bool:
        """Whether the thread is in no module."""
        return not self.stack

    def enter(self, module: nn.Module) -> None:
        """A forward begins."""
        node = self.nodes.get(id(module))
        if node is None:
            node = self._name_root(module) if self.outside else self._unnamed(module)
        self.stack.append(self.place.here)
        self.place.here = node

    def leave(self) -> None:
        """A forward ends, or was left by an exception."""
        if self.stack:
            self.place.here = self.stack.pop()

    def leave_all(self) -> None:
        """The thread is in no module: an interrupt between two lines of ours leaves forwards without a word."""
        while self.stack:
            self.leave()

    def _name_root(self, root: nn.Module) -> Node[Action]:
        kind = type(root).__name__
        # The first name that is free: a root that is made anew in every step finds its own again.
        names = chain((kind,), (f"{kind}#{number}" for number in count(2)))
        name = next(name for name in names if name not in self._names)
        self._names.add(name)
        nodes: dict[int, Node[Action]] = {}
        for path, module in walk(root):
            key, named = id(module), self._named.get(id(module))
            # What another root has that lives keeps its name: a wrapper that comes for an evaluation renames no model.
            if module is root or named is None or named() is not module:
                nodes[key] = Node(f"{name}.{path}" if path else name, type(module).__name__)
                # What is replaced goes before its root: what is made next may have its id, and be a root itself.
                self._named[key] = weakref.ref(module, partial(self._gone, key))
        self.nodes.update(nodes)
        # An id is good for as long as the object lives: with the root the names that it gave go, too.
        key = id(root)
        self._roots[key] = weakref.ref(root, lambda _: self._forget(name, key, nodes))
        return nodes[key]

    def _gone(self, key: int, ref: weakref.ref[nn.Module]) -> None:
        if self._named.get(key) is ref:
            del self._named[key]
            self.nodes.pop(key, None)

    def _forget(self, name: str, root: int, nodes: Mapping[int, Node[Action]]) -> None:
        del self._roots[root]
        self._names.discard(name)
        for key, node in nodes.items():
            if self.nodes.get(key) is node:
                del self.nodes[key], self._named[key]

    def _unnamed(self, module: nn.Module) -> Node[Action]:
        """A module that its root did not list, such as one made within a forward: one name per class and place."""
        kind = type(module).__name__
        here = self.place.here
        node = here.unnamed.get(kind)
        if node is None:
            node = here.unnamed[kind] = Node(f"{here.path}.<{kind}>", kind)
        return node
