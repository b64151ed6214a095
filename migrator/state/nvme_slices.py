"""Slices of an optimizer's step whose state lies on NVMe: read ahead of the step, and written behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from torch_tiers.migrator.state.chunks import cut_at, may_be_cut
from torch_tiers.migrator.state.nvme_state import NvmeState
from torch_tiers.migrator.state.nvme_tensor import NvmePart, NvmeTensor
from torch_tiers.migrator.state.parameter_state import ParameterState
from torch_tiers.migrator.streams import Event

AHEAD = 3  # slices that are being read while one is copied


def comes_from_nvme(of: ParameterState) -> bool:
    """Whether a parameter's state lies on NVMe, and can come in parts now. What was restored is plain from now on."""
    for name, value in of.state.items():
        if isinstance(value, NvmeTensor) and value.kept.restored is not None:
            of.state[name] = value.kept.restored
    return bool(_on_nvme(of)) and may_be_cut(of)


def parts_on_nvme(of: ParameterState) -> list[ParameterState]:
    """Cut a parameter's state as it was cut when it was put on NVMe; the tensors of each part are `NvmePart`."""
    stored = _on_nvme(of)
    length = next(iter(stored.values())).kept.length
    return cut_at(replace(of, tensors=stored), length)


def _on_nvme(of: ParameterState) -> dict[str, NvmeTensor]:
    return {name: value for name, value in of.state.items() if isinstance(value, NvmeTensor)}


class NvmeSlices:
    """Slices of which some have parts on NVMe: these lie in host memory from when a slice comes until it has left.

    Iterate over this once, and call `left` for each slice in order; `close` at last, also after an error.

    Parameters
    ----------
    slices : iterable of sequence of ParameterState
        In order.
    state : NvmeState
        Has the parts.
    """

    def __init__(self, slices: Iterable[Sequence[ParameterState]], state: NvmeState) -> None:
        self._slices = slices
        self._state = state
        self._taken: deque[list[NvmePart]] = deque()  # by slice

    def __iter__(self) -> Iterator[list[ParameterState]]:
        coming = deque[Sequence[ParameterState]]()
        for slice_ in self._slices:
            for part in _parts_in(slice_):
                self._state.read_ahead(part.stored)
            coming.append(slice_)
            if len(coming) > AHEAD:
                yield self._take(coming.popleft())
        while coming:
            yield self._take(coming.popleft())

    def _take(self, slice_: Sequence[ParameterState]) -> list[ParameterState]:
        taken = list[NvmePart]()
        self._taken.append(taken)
        return [replace(each, tensors=self._bytes(each.tensors, taken)) for each in slice_]

    def _bytes(self, tensors: Mapping[str, Tensor | NvmePart], taken: list[NvmePart]) -> dict[str, Tensor]:
        found = dict[str, Tensor]()
        for name, of in tensors.items():
            if isinstance(of, NvmePart):
                found[name] = self._state.take(of.stored).view(of.dtype)
                taken.append(of)
            else:
                found[name] = of
        return found

    def left(self, gone: Event) -> None:
        """The next slice is on its way back, and will be there when `gone` is passed."""
        for part in self._taken.popleft():
            self._state.put_back(part.stored, gone)

    def close(self, now: Event) -> None:
        """No more slices come; those that have not left were not updated."""
        while self._taken:
            self.left(now)


def _parts_in(slice_: Iterable[ParameterState]) -> Iterator[NvmePart]:
    return (of for each in slice_ for of in each.tensors.values() if isinstance(of, NvmePart))
