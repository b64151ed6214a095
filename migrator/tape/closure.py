"""Closures: recompute tensors by running only the recorded operators that made them.

A *closure* of a tensor is the smallest set of recorded operators that makes it from *leaves*: from values of which
something was packed, and from those that no recorded operator made. What it returns has the bits of the tensor as it
was, or it raises. One that was compared with the tensor once may be believed, and so may all with its `signature`, as
long as nobody writes its leaves behind everybody's back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from torch_tiers.allocator.errors import TiersError
from torch_tiers.migrator.tape import native


class Differs(TiersError):
    """What a closure made, or would have made, is not what was there; it names the operator, if it was one."""


class Packs:
    """What was packed of saved tensors: closures that are found here begin with that, wherever it is by then.

    Of the record under way when it was made; of `Recorder.packs`.

    Attributes
    ----------
    note : callable
        Remembers what was packed of a tensor at a site (tensor, packed, key), without keeping it alive; of a tuple its
        first. Nothing is remembered of a part of a storage, which could move alone.
    """

    def __init__(self, library: native.Recorder) -> None:
        self._library = library
        self._handle = library.packs()
        self.note: Callable[[Tensor, Any, str], None] = partial(library.note, self._handle)

    def refilled(self, storages: Collection[int]) -> None:
        """Say of storages, by the number that `UntypedStorage` has, that they are emptied and filled again.

        As FSDP2 does with those in which it gathers parameters; whoever says so answers for their bytes: nobody watches
        them. A closure begins with those that are full when it is found, and raises where one is empty when it runs.
        """
        self._library.refilled(self._handle, [*storages])

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
        Closures that compute the same on leaves of the same form have the same, in one process.
    inputs : tuple
        What was packed of what it takes.
    keys : tuple of str
        At which sites.
    last : int
        Number of its last operator in the record.
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
        """The tensors, made again of what its inputs were unpacked to, on the current stream.

        Nothing of the program's is changed: what an operator writes is a copy. The interpreter's lock is not held.
        In no graph's capture, and not in a thread that has another number of threads to compute with.

        Raises
        ------
        Differs
            If a leaf was written since, has another size, or was released; if an operator returns what is of another
            form than it was; or if PyTorch's settings are not what they were.
        """
        made = self._library.make(self._handle, values)
        if isinstance(made, str):
            raise Differs(made)
        return made
