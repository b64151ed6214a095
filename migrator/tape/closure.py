"""Closures: recompute tensors by running only the operators of a tape that made them.

A *closure* of some tensors is the smallest set of recorded operators that makes them from *leaves*: from values that
somebody promises to have, and from those that no operator of the tape made. What it returns has the bits of the
targets as they were, or it raises. One that is `verify`-ed once may be believed, and so may all with its `signature`,
as long as nobody writes its leaves behind everybody's back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torch_tiers.allocator.errors import TiersError
from torch_tiers.migrator.tape import native

POISON = 0xA5
"""Neither a small number, nor one that a program is likely to compute."""


class Differs(TiersError):
    """What a closure made, or would have made, is not what was there; it names the operator, if it was one."""


@dataclass(frozen=True, slots=True)
class Refused:
    """There is no closure.

    Attributes
    ----------
    reason : str
        Why, in plain words.
    """

    reason: str


class Stops:
    """Values that somebody has, or will have when a closure runs: its walk goes no further back than these.

    Of the record under way when it was made; of `Recorder.stops`.
    """

    def __init__(self, library: native.Recorder) -> None:
        self._library = library
        self.handle = library.stops()

    def add(self, tensor: Tensor) -> tuple[int, int] | None:
        """Promise the storage of a tensor as it is now.

        Returns its storage and its state on the tape; None if it has no place there, and then nothing is promised.
        """
        found = self._library.promise(self.handle, tensor)
        return None if found is None else (found[0], found[2])


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value that a closure begins with.

    Attributes
    ----------
    storage, state : int
        On the tape; see `torch_tiers.migrator.tape.operators`.
    nbytes : int
        Of the storage.
    device
        Where it has to be when the closure runs.
    relative : tuple of (int, int), or None
        In the form that is the same in every record: how many operators before the one that made the newest target,
        and which of that operator's outputs. None if no operator of the tape returned it.
    is_constant : bool
        Whether it is a few numbers of Python's whose tensor is gone: the closure has them, nobody needs to give any.
    """

    storage: int
    state: int
    nbytes: int
    device: torch.device
    relative: tuple[int, int] | None
    is_constant: bool


class Packs:
    """What was packed of saved tensors: closures that are found here begin with that, wherever it is by then.

    Of the record under way when it was made; of `Recorder.packs`.
    """

    def __init__(self, library: native.Recorder) -> None:
        self._library = library
        self._handle = library.packs()

    def refilled(self, storages: Collection[int]) -> None:
        """Say of storages, by the number that `UntypedStorage` has, that they are emptied and filled again.

        As FSDP2 does with those in which it gathers parameters; whoever says so answers for their bytes: nobody watches
        them. A closure begins with those that are full when it is found, and raises where one is empty when it runs.
        """
        self._library.refilled(self._handle, [*storages])

    def note(self, tensor: Tensor, packed: Any, key: str) -> None:
        """Remember what was packed of a tensor at a site, without keeping it alive; of a tuple its first.

        Nothing is remembered of a part of a storage, which could move alone.
        """
        self._library.note(self._handle, tensor, packed, key)

    def forget_dead(self) -> None:
        """Remember no more what was packed of tensors that no graph holds any longer."""
        self._library.forget(self._handle)

    def find(self, tensor: Tensor, settings: int, is_fixed: Callable[[int], bool]) -> Bound | None:
        """What makes all of a tensor's storage again; None if there is no such thing.

        Parameters
        ----------
        tensor
            All of a storage.
        settings
            Of PyTorch's; if the operators ran under others, there is no such thing.
        is_fixed
            Whether nobody but operators writes a storage on the host, by the number that `UntypedStorage` has.
        """
        found = self._library.find_packed(self._handle, tensor, settings, is_fixed)
        return None if found is None else Bound(self._library, *found)


class Bound:
    """A closure whose leaves are in what was packed, or in itself.

    Of leaves that it has itself it takes copies before they are written.

    Attributes
    ----------
    signature : int
        See `Closure`.
    inputs : tuple
        What was packed of what it takes.
    keys : tuple of str
        At which sites.
    last : int
        Number of its last operator on the tape.
    refilled : bool
        Whether it begins with a storage that is; see `Packs.refilled`.
    """

    __slots__ = ("__weakref__", "_handle", "_library", "inputs", "keys", "last", "refilled", "signature")

    def __init__(
        self,
        library: native.Recorder,
        signature: int,
        inputs: tuple[Any, ...],
        keys: tuple[str, ...],
        last: int,
        refilled: bool,
        handle: native.Handle,
    ) -> None:
        self._library = library
        self.signature = signature
        self.inputs = inputs
        self.keys = keys
        self.last = last
        self.refilled = refilled
        self._handle = handle

    @property
    def names(self) -> tuple[str, ...]:
        """Of its operators, in the order in which they run."""
        return tuple(self._library.names(self._handle))

    @property
    def is_stale(self) -> bool:
        """Whether a leaf was written where it was, since the closure was made."""
        return self._library.is_stale(self._handle)

    def also(self, before: Bound) -> bool:
        """Make what another one makes, too, before its own, if both run the same operators; whether it does so now.

        Not once it was run.
        """
        return self._library.also(self._handle, before._handle)

    def make(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The tensors, made again of what its inputs were unpacked to; see `Closure.run`.

        Raises
        ------
        Differs
            See `Closure.run`.
        """
        made = self._library.make(self._handle, values)
        if isinstance(made, str):
            raise Differs(made)
        return made


class Closure:
    """The operators that make some tensors again.

    Attributes
    ----------
    signature : int
        Closures that compute the same on leaves of the same form have the same, in one process.
    operators : int
        How many it runs.
    random : bool
        Whether one of them draws random numbers.
    device
        The one that it runs on.
    stream : int
        Of that device, on which the operators ran, as PyTorch numbers them. They run again on whichever is the current
        one.
    settings : int
        Those of PyTorch's under which the operators ran, as `Recorder.settings` tells them.
    """

    def __init__(self, library: native.Recorder, handle: native.Handle) -> None:
        self._library = library
        self._handle = handle
        described = library.described(handle)
        self.signature, self.operators, self.random, self.device, self.stream, self.settings = described

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """What it begins with, in the order in which `run` wants it."""
        return tuple(Leaf(*each) for each in self._library.begins_with(self._handle))

    @property
    def names(self) -> tuple[str, ...]:
        """Of its operators, in the order in which they run."""
        return tuple(self._library.names(self._handle))

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of its operators, on the tape."""
        return tuple(self._library.numbers(self._handle))

    def leaf_tensors(self) -> tuple[Tensor | None, ...]:
        """For each leaf the bytes of all of its storage, as a tensor that lies on it.

        None for what was promised and is not there any more. Whoever wants the values elsewhere copies these.
        """
        return tuple(self._library.leaves(self._handle))

    def run(
        self, leaves: Sequence[Tensor | tuple[Tensor, int] | None] | None = None, *, poison: int | None = None
    ) -> list[Tensor]:
        """The targets, made again, on the current stream.

        Nothing of the program's is changed: what an operator writes is a copy. The interpreter's lock is not held.
        In no graph's capture, and not in a thread that has another number of threads to compute with.

        Parameters
        ----------
        leaves
            For each leaf a tensor that lies on a storage with its bytes, or one of so many bytes in a larger storage;
            or any that was a part of it, with the byte at which that began. None for one that the closure holds, or
            for numbers of Python's. It holds all of them, where nothing is given.
        poison
            What memory is filled with that no operator has written.

        Raises
        ------
        Differs
            If a leaf was written since, has another size, or was released; if an operator returns what is of another
            form than it was; or if PyTorch's settings are not what they were.
        """
        made = self._library.run(self._handle, leaves, -1 if poison is None else poison)
        if isinstance(made, str):
            raise Differs(made)
        return made

    @property
    def is_stale(self) -> bool:
        """Whether a leaf was written where it was, since the closure was made."""
        return self._library.is_stale(self._handle)

    def watch(self, function: Callable[[int], object] | None) -> None:
        """Have a function called before a leaf is written where it is; with None, no longer.

        It is given the leaf's number, once for each leaf, in the thread that writes, as long as the closure lives. Only
        of operators that are recorded is it told; of others `is_stale` knows afterwards, if versions count them. What
        it raises is reported as unraisable, and the leaf counts as written. It is to hold the closure weakly, or both
        live for ever.
        """
        self._library.watch(self._handle, function)


def closure(
    library: native.Recorder,
    record: native.Record | None,
    targets: Sequence[Tensor],
    stops: Stops | None,
    relative: Sequence[tuple[int, int]],
) -> Closure | Refused:
    """See `Recorder.closure`."""
    found = library.closure(record, targets, None if stops is None else stops.handle, relative)
    return Refused(found) if isinstance(found, str) else Closure(library, found)
