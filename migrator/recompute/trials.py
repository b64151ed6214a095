"""Tries, while an iteration is recorded, which saved tensors can be recomputed bit for bit, and measures the cost.

When backward asks for a tensor that has a replay, the tensor is recomputed and compared with the original, once for
each site. Inputs that are away are copied for the trial alone: which groups return, and when, is as without it. The
host does not wait for the device: results are read when the iteration is over.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_tiers.allocator.errors import TiersError
from torch_tiers.migrator.model.trace import Recipe
from torch_tiers.migrator.recompute.replays import Peek, Replay, kind_of, operators_of, run
from torch_tiers.migrator.recompute.verified import Took, Verified, layout
from torch_tiers.migrator.streams import Meter
from torch_tiers.migrator.streams.pieces import flat


@dataclass(slots=True)
class Trial:
    """A replay that waits for backward to ask for its tensor.

    Attributes
    ----------
    ident : int
        The tensor's storage.
    what : Replay or None
        The replay of that storage; None once it was tried.
    index : int
        Which of the replay's results it is.
    verified : Verified
        What will have been verified.
    inputs : tuple of int
        The storages of its inputs, each once.
    size, stride : tuple of int
        Of the result.
    first, nbytes : int
        The element of the storage at which the tensor begins, and the storage's bytes.
    """

    ident: int
    what: Replay | None
    index: int
    verified: Verified
    inputs: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
    first: int
    nbytes: int


class _Tried(NamedTuple):
    trial: Trial
    same: Tensor
    start: Any
    end: Any
    scratch: int
    host: float


class Trials:
    """The trials of one iteration.

    Parameters
    ----------
    meter : Meter
        Measures time and memory.
    verified : mapping of str to Verified
        What held in earlier iterations, by site.
    refused : collection of str
        Sites that are not tried.
    """

    def __init__(self, meter: Meter, verified: Mapping[str, Verified], refused: Collection[str] = ()) -> None:
        self._meter = meter
        self._verified = verified
        self._refused = refused
        self._seen: set[int] = set()
        self._left_out: set[int] = set()
        self._held: dict[int, tuple[Recipe, Verified]] = {}
        self._calls: dict[int, object] = {}  # of each storage the operator that returned it, and what that is made from
        self._tried: list[_Tried] = []

    def is_new(self, ident: int, key: str) -> bool:
        """Return whether storage `ident`, saved at site `key`, is to be tried, and was not before."""
        if ident in self._seen or key in self._refused:
            return False
        self._seen.add(ident)
        return True

    def leave_out(self, ident: int) -> None:
        """Have storage `ident` recomputed at no site."""
        self._seen.add(ident)
        self._left_out.add(ident)

    def knows(
        self, ident: int, key: str, base: Tensor, what: Replay, index: int, inputs: tuple[int, ...], chosen: object
    ) -> bool:
        """Return whether the replay held at this site before; then it counts as held, with its present inputs."""
        self._calls[ident] = what.call, inputs
        verified = self._verified.get(key)
        if verified is None or verified.choices is not chosen:
            return False
        if verified.version != base._version or (took := verified.took(what, index, base)) is None:
            return False
        verified = verified._replace(found=verified.found.union(what.keys))
        self._held[ident] = (_recipe(what.names[index], took, inputs), verified)
        return True

    def attempt(self, trial: Trial, tensor: Tensor, peek: Peek) -> None:
        """Recompute a storage and compare it with that of `tensor`, which backward has been given."""
        # There may be no memory for it, no room to bring an input back, or no such kernel: the program did not ask for
        # this, and is not to fail.
        with self._meter.untracked(), suppress(RuntimeError, TiersError):
            self._attempt(trial, tensor, peek)

    def _attempt(self, trial: Trial, tensor: Tensor, peek: Peek) -> None:
        what = trial.what
        assert what is not None
        self._calls[trial.ident] = what.call, trial.inputs
        seen = {id(packed): peek(packed) for packed in what.inputs}  # once: some are copied, which takes longer

        def look(packed: Any) -> Tensor:
            return seen[id(packed)]

        made = run(what, look)[trial.index]
        if not _is_storage(trial, made):
            return
        first = (int(tensor.storage_offset()) - trial.first) * tensor.itemsize
        same = same_bits(made.untyped_storage(), tensor.untyped_storage(), first)
        # The result is freed before it is recomputed once more for its time: that run finds memory that is mapped
        # and kernels that are loaded. To map pages takes the host milliseconds, in which the device has nothing to do.
        del made
        self._meter.most()
        before = self._meter.most()  # nothing lies between: what is in use now
        start, began = self._meter.mark(), time.perf_counter()
        run(what, look)
        host, end = time.perf_counter() - began, self._meter.mark()
        scratch = max(0, self._meter.most() - before - trial.nbytes)
        # The trial's inputs need not outlive the node that saved them.
        self._tried.append(_Tried(replace(trial, what=None), same, start, end, scratch, host))

    def results(self) -> dict[int, tuple[Recipe, Verified]]:
        """Return what held, by storage; block until the device has finished all trials."""
        for trial, same, start, end, scratch, host in self._tried:
            if not same:  # one by one: to gather them would ask for memory that the program does not
                continue
            (name,) = trial.verified.held
            took = Took(self._meter.seconds(start, end), scratch, host)
            verified = trial.verified._replace(held={name: took})
            self._held[trial.ident] = (_recipe(name, took, trial.inputs), verified)
        first: dict[object, int] = {}  # storage of each operator, whether it held or not: it is to have the same always
        for ident in sorted(self._calls):
            first.setdefault(self._calls[ident], ident)
        return {
            ident: (replace(recipe, call=first[self._calls[ident]]), verified)
            for ident, (recipe, verified) in self._held.items()
            if ident not in self._left_out
        }


def _recipe(name: str, took: Took, inputs: tuple[int, ...]) -> Recipe:
    return Recipe(operators_of(name), inputs, took.seconds, took.scratch, took.host, kind_of(name))


def _is_storage(trial: Trial, made: Tensor) -> bool:
    """Return whether the result is a whole storage as the trial expects."""
    fits = (made.size(), made.stride(), made.storage_offset()) == (trial.size, trial.stride, 0)
    return fits and layout(made) == trial.verified.layout and made.untyped_storage().nbytes() == trial.nbytes


def same_bits(one: torch.UntypedStorage, other: torch.UntypedStorage, first: int) -> Tensor:
    """Return whether all bytes of `one` equal those of `other` from byte `first` on."""
    nbytes = one.nbytes()
    dtype = torch.uint8 if nbytes % 8 or first % 8 else torch.int64
    with torch.no_grad():
        return torch.eq(flat(one, 0, nbytes, dtype), flat(other, first, nbytes, dtype)).all()
