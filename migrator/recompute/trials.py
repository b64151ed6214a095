"""Finds out, while a period is recorded, which saved tensors can be recomputed bit for bit, and what that takes.

A tensor that has a formula is made a second time when backward asks for it, and compared with the original; once for
each site. What it is made from and is away is copied for the trial alone: what comes back, and when, is as in a period
without. The device is not waited for: what it found is read when the period is over.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_tiers.allocator.errors import TiersError
from torch_tiers.migrator.lanes import Meter, flat
from torch_tiers.migrator.recompute.dropped import Peek, run
from torch_tiers.migrator.recompute.finder import Took, Verified, layout
from torch_tiers.migrator.recompute.formulas import Formula, operation
from torch_tiers.migrator.recompute.fused import plainly
from torch_tiers.migrator.recompute.origins import Origins
from torch_tiers.migrator.trace import Recipe


class Inputs(NamedTuple):
    """The storages of a formula's inputs, each once; and those of them that `Recipe.held` names."""

    idents: tuple[int, ...]
    held: tuple[int, ...]


@dataclass(slots=True)
class Trial:
    """A formula that waits for backward to ask for the tensor that it should make.

    Attributes
    ----------
    ident : int
        The tensor's storage.
    what : Formula
        How to make all of that storage.
    verified : Verified
        What will have been seen to hold.
    inputs : Inputs
        The storages of the formula's inputs.
    size, stride : tuple of int
        Of what is made.
    first, nbytes : int
        The element of the storage at which the tensor begins, and the storage's bytes.
    unlike : Formula, optional
        Where `what` goes by a guess: the same by another, which must make something else, or the guess was not tested.
    """

    ident: int
    what: Formula
    verified: Verified
    inputs: Inputs
    size: tuple[int, ...]
    stride: tuple[int, ...]
    first: int
    nbytes: int
    unlike: Formula | None = None


class _Tried(NamedTuple):
    trial: Trial
    same: Tensor
    start: Any
    end: Any
    scratch: int
    host: float


class Trials:
    """The trials of one period.

    Parameters
    ----------
    meter : Meter
        Takes the time.
    verified : mapping of str to Verified
        What held in earlier periods, by site.
    """

    def __init__(self, meter: Meter, verified: Mapping[str, Verified]) -> None:
        self._meter = meter
        self._verified = verified
        self._seen: set[int] = set()
        self._held: dict[int, tuple[Recipe, Verified]] = {}
        self._tried: list[_Tried] = []

    def is_new(self, ident: int) -> bool:
        """Whether storage `ident` was not looked at before."""
        if ident in self._seen:
            return False
        self._seen.add(ident)
        return True

    def knows(self, ident: int, key: str, base: Tensor, what: Formula, inputs: Inputs, source: Origins) -> bool:
        """Whether the formula held at this site before; then it counts as held, with what it finds now."""
        verified = self._verified.get(key)
        if verified is None or what.name not in verified.held or verified.choices not in (None, source.choices):
            return False
        if (verified.layout, verified.version) != (layout(base), base._version):
            return False
        verified = verified._replace(found=verified.found | source.found)
        self._held[ident] = (_recipe(what.name, verified, inputs), verified)
        return True

    def attempt(self, trial: Trial, tensor: Tensor, peek: Peek) -> None:
        """Make a storage by a formula and compare it with that of `tensor`, which backward has been given."""
        # There may be no memory for it, no room to bring an input back, or no such kernel: the program did not ask for
        # this, and is not to fail.
        with self._meter.aside(), suppress(RuntimeError, TiersError):
            self._attempt(trial, tensor, peek)

    def _attempt(self, trial: Trial, tensor: Tensor, peek: Peek) -> None:
        seen = {id(packed): peek(packed) for packed in trial.what.inputs}  # once: some are copied, which takes longer
        if trial.unlike is not None:
            pairs = zip(trial.unlike.inputs, trial.what.inputs, strict=True)
            seen |= {id(packed): seen[id(same)] for packed, same in pairs}

        def look(packed: Any) -> Tensor:
            return seen[id(packed)]

        with plainly() as plain:
            ways = [run(trial.what, look)]
        # Either may be taken later, as kernels of ours do not know all layouts, and each needs what the other does not.
        if plain.asked:  # beside the first, in whose memory the right bytes would lie already
            ways.append(run(trial.what, look))
        if not all(_is_storage(trial, made) for made in ways):
            return
        first = (int(tensor.storage_offset()) - trial.first) * tensor.itemsize
        same = [_same_bits(made.untyped_storage(), tensor.untyped_storage(), first) for made in ways]
        if trial.unlike is not None:  # or else any guess would have done, and the next numbers tell them apart
            # A kernel of ours may start from what was saved, and take no epsilon at all. What raises is unlike it.
            with plainly(), suppress(RuntimeError):
                unlike = run(trial.unlike, look)
                same.append(~_same_bits(unlike.untyped_storage(), tensor.untyped_storage(), first))
                del unlike
        # All that was made is given back before it is made once more for its time: that run finds memory that is mapped
        # and kernels that are loaded. To map pages takes the host milliseconds, in which the device has nothing to do.
        ways.clear()
        self._meter.most()
        before = self._meter.most()  # nothing lies between: what is in use now
        start, began = self._meter.mark(), time.perf_counter()
        run(trial.what, look)
        host, end = time.perf_counter() - began, self._meter.mark()
        scratch = max(0, self._meter.most() - before - trial.nbytes)
        # The trial's inputs need not outlive the node that saved them.
        self._tried.append(
            _Tried(replace(trial, what=_NOTHING, unlike=None), torch.stack(same).all(), start, end, scratch, host)
        )

    def results(self) -> dict[int, tuple[Recipe, Verified]]:
        """What held, by storage; blocks until the device has passed all trials."""
        for trial, same, start, end, scratch, host in self._tried:
            if not same:  # one by one: to gather them would ask for memory that the program does not
                continue
            (name,) = trial.verified.held
            verified = trial.verified._replace(held={name: Took(self._meter.seconds(start, end), scratch, host)})
            self._held[trial.ident] = (_recipe(name, verified, trial.inputs), verified)
        return self._held


def _recipe(name: str, verified: Verified, inputs: Inputs) -> Recipe:
    took = verified.held[name]
    return Recipe(operation(name), inputs.idents, took.seconds, took.scratch, inputs.held, took.host)


def _is_storage(trial: Trial, made: Tensor) -> bool:
    """Whether what was made is all of a storage as the trial's is."""
    fits = (made.size(), made.stride(), made.storage_offset()) == (trial.size, trial.stride, 0)
    return fits and layout(made) == trial.verified.layout and made.untyped_storage().nbytes() == trial.nbytes


def _same_bits(one: torch.UntypedStorage, other: torch.UntypedStorage, first: int) -> Tensor:
    """Whether all bytes of `one` are those of `other` from byte `first` on."""
    nbytes = one.nbytes()
    dtype = torch.uint8 if nbytes % 8 or first % 8 else torch.int64
    with torch.no_grad():
        return torch.eq(flat(one, 0, nbytes, dtype), flat(other, first, nbytes, dtype)).all()


_NOTHING = Formula("", (), lambda values: torch.empty(0))
