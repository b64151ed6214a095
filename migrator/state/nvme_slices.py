"""Slices of an optimizer's step whose state lies on NVMe: read ahead of the step, and written behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from torch_tiers.migrator.state.chunks import cut_at, may_be_cut
from torch_tiers.migrator.state.nvme_state import AHEAD, NvmeState
from torch_tiers.migrator.state.nvme_tensor import NvmePart, NvmeTensor
from torch_tiers.migrator.state.parameter_state import ParameterState
from torch_tiers.migrator.streams import Event


def unwrap_restored(of: ParameterState) -> None:
    """Have the optimizer's state of a parameter contain the plain tensors of what was restored to memory."""
    for name, value in of.state.items():
        if isinstance(value, NvmeTensor) and value.contents.restored is not None:
            of.state[name] = value.contents.restored


def comes_in_parts(of: ParameterState, nvme: NvmeState) -> bool:
    """Whether a parameter's state lies on NVMe, and can be updated part by part."""
    stored = _on_nvme(of).values()
    return bool(stored) and all(tensor.contents.lies_in(nvme) for tensor in stored) and may_be_cut(of)


def parts_on_nvme(of: ParameterState) -> list[ParameterState]:
    """Cut a parameter's state as it was cut when it was put on NVMe; the tensors of each part are `NvmePart`."""
    stored = _on_nvme(of)
    length = next(iter(stored.values())).contents.length
    return cut_at(replace(of, tensors=stored), length)


def _on_nvme(of: ParameterState) -> dict[str, NvmeTensor]:
    return {name: value for name, value in of.state.items() if isinstance(value, NvmeTensor)}


class NvmeSlices:
    """Iterator over slices. Parts on NVMe are read into host memory before their slice is yielded.

    They stay there until `written_back` is called for it. To be iterated over once; call `close` at last, also after an
    error.

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
                found[name] = self._state.check_out(of.stored).view(of.dtype)
                taken.append(of)
            else:
                found[name] = of
        return found

    def written_back(self, done: Event) -> None:
        """The oldest slice was updated: once `done` is passed its bytes are in host memory, and go to NVMe."""
        for part in self._taken.popleft():
            self._state.check_in(part.stored, done)

    def close(self, now: Event) -> None:
        """Return what was not updated, as it is once `now` is passed."""
        while self._taken:
            self.written_back(now)


def _parts_in(slice_: Iterable[ParameterState]) -> Iterator[NvmePart]:
    return (of for each in slice_ for of in each.tensors.values() if isinstance(of, NvmePart))
