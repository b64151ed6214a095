"""Finds out, while a period is recorded, which saved tensors can be made again bit for bit, and what that takes.

A tensor that has a formula is made a second time, from inputs that are in HBM at that moment, and compared with the
original; once for each site. The device is not waited for: what it found is read when the period is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from migrator.formulas import Formula
from migrator.lanes import Meter, flat
from migrator.remake import Origins, Peek, Verified, layout, run
from migrator.trace import Recipe


class _Trial(NamedTuple):
    ident: int
    verified: Verified
    inputs: tuple[int, ...]
    same: Tensor
    start: Any
    end: Any


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
        self._trials: list[_Trial] = []

    def is_new(self, ident: int) -> bool:
        """Whether storage `ident` was not looked at before."""
        if ident in self._seen:
            return False
        self._seen.add(ident)
        return True

    def knows(self, ident: int, key: str, base: Tensor, what: Formula, inputs: tuple[int, ...]) -> bool:
        """Whether the formula held at this site before; then it counts as held."""
        verified = self._verified.get(key)
        if verified is None or verified.name != what.name or verified.layout != layout(base):
            return False
        self._held[ident] = (_recipe(verified, inputs), verified)
        return True

    def attempt(
        self, ident: int, base: Tensor, what: Formula, source: Origins, inputs: tuple[int, ...], peek: Peek
    ) -> None:
        """Make `base`, which lies on storage `ident`, once more by the formula that `source` gave, and compare.

        `inputs` are the storages of the formula's inputs.
        """
        with self._meter.aside():
            start = self._meter.mark()
            made = run(what, peek)
            end = self._meter.mark()
            if layout(made) != layout(base) or made.storage_offset():
                return
            storage, original = made.untyped_storage(), base.untyped_storage()
            if storage.nbytes() != original.nbytes() or storage._cdata == original._cdata:
                return
            same = _same_bits(storage, original)
            verified = Verified(what.name, source.told, layout(base), source.searched, 0.0)
            self._trials.append(_Trial(ident, verified, inputs, same, start, end))

    def results(self) -> dict[int, tuple[Recipe, Verified]]:
        """What held, by storage; blocks until the device has passed all trials."""
        if not self._trials:
            return self._held
        held = torch.stack([trial.same for trial in self._trials]).tolist()
        for trial in (trial for trial, same in zip(self._trials, held, strict=True) if same):
            verified = trial.verified._replace(seconds=self._meter.seconds(trial.start, trial.end))
            self._held[trial.ident] = (_recipe(verified, trial.inputs), verified)
        return self._held


def _recipe(verified: Verified, inputs: tuple[int, ...]) -> Recipe:
    return Recipe(verified.name.split("(")[0], inputs, verified.seconds)


def _same_bits(one: torch.UntypedStorage, other: torch.UntypedStorage) -> Tensor:
    dtype = torch.uint8 if one.nbytes() % 8 else torch.int64
    with torch.no_grad():
        return torch.eq(flat(one, 0, one.nbytes(), dtype), flat(other, 0, one.nbytes(), dtype)).all()
