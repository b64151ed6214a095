"""What tests of records have in common."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_tiers.migrator.tape.closure import Bound
from torch_tiers.migrator.tape.recorder import Recorder


def names(recorder: Recorder) -> list[str]:
    """The operators of the record, which is over then; it is whole."""
    listed = recorder.listed()
    recorder.stop()
    assert listed is not None
    return [name.removeprefix("aten::") for name, _ in listed]


def short(closure: Bound | None) -> list[str]:
    """The operators of a closure, without their overloads."""
    assert closure is not None
    return [each.removeprefix("aten::").partition(".")[0] for each in closure.names]


def in_another_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def is_whole(tensor: Tensor) -> bool:
    """Whether it is all of its storage: of others there are no closures."""
    return tensor.storage_offset() == 0 and tensor.nbytes == tensor.untyped_storage().nbytes()


def bytes_of(tensor: Tensor) -> Tensor:
    """All of its storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@dataclass(frozen=True)
class Form:
    """What part of a storage a tensor is, and how it is read."""

    dtype: torch.dtype
    device: torch.device
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return cls(tensor.dtype, tensor.device, *place, tensor.is_conj(), tensor.is_neg())

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """A tensor of this form."""
        made = torch.empty(0, dtype=self.dtype, device=self.device)
        made.set_(storage, self.offset, self.shape, self.strides)
        torch._C._set_conj(made, self.is_conj)
        torch._C._set_neg(made, self.is_neg)
        return made


def snapshot(tensor: Tensor) -> Tensor:
    """A copy on a storage of its own of the same size."""
    return Form.of(tensor).on(tensor.untyped_storage().clone())


def has_the_bits_of(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same form, and storages of the same bytes."""
    return Form.of(one) == Form.of(other) and torch.equal(bytes_of(one), bytes_of(other))


class Packed:
    """Stands in a graph for a tensor that is elsewhere by now.

    Attributes
    ----------
    value : Tensor
        A copy, as whoever packed it would bring it back.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.value = snapshot(tensor)


class Taped:
    """A record under way, and what is packed meanwhile; nothing that is done here is recorded."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        assert recorder.begin()
        self.packs = recorder.packs()
        self._graph: list[Packed] = []

    def note(self, tensor: Tensor, key: str = "net:0") -> Packed:
        with self.recorder.untracked():
            self._graph.append(Packed(tensor))
            self.packs.note(tensor, self._graph[-1], key)
        return self._graph[-1]

    def find(self, tensor: Tensor, *fixed: Tensor) -> Bound | None:
        """What makes it again. Only operators write what is `fixed`: where nothing is given, all there is."""
        assert tensor.is_sparse or tensor.is_meta or is_whole(tensor)
        among = {storage_of(each) for each in fixed}
        with self.recorder.untracked():
            return self.packs.find(
                tensor, self.recorder.settings(), (lambda storage: storage in among) if fixed else lambda storage: True
            )

    def made_again(self, *targets: Tensor) -> None:
        """Each has a closure that makes its bits, twice, on a storage of its own."""
        for target in targets:
            found = self.find(target)
            assert found is not None
            with self.recorder.untracked():
                for _ in range(2):
                    (made,) = made_of(found)
                    assert has_the_bits_of(made, target), found.names
                    assert target.numel() == 0 or made.data_ptr() != target.data_ptr()


def made_of(closure: Bound) -> list[Tensor]:
    """What it makes of what `Taped` packed."""
    return closure.make([packed.value for packed in closure.inputs])
