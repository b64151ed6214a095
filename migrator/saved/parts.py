"""Decides whether a saved tensor may share the copy that was taken for an earlier tensor of its storage.

Views share the version counter of their base, so a copy that was taken for one has the bytes of the next. But no
counter tells what is written by `.data`. torchdiffeq fills a buffer so, column by column, and saves what there is of
it. Such a buffer has no graph, and only parts of such buffers are suspected: those of a fused projection share a copy.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from torch_tiers.migrator.offload.group import Saved, State
from torch_tiers.migrator.recording.storages import Known
from torch_tiers.migrator.streams import Stream

ANY = -1
"""`Known.operation` of a copy that tensors of any operation may share; `native/storages.h` begins with it."""

_operation = torch._C._autograd._get_sequence_nr
"""Tells operations of this thread apart, of those that save anything."""


def is_of_a_buffer(tensor: Tensor, nbytes: int) -> bool:
    """Return whether a tensor is a view of a part of a buffer: of a tensor of so many bytes that has no graph."""
    if not tensor._is_view() or tensor._base is None or tensor._base.requires_grad:
        return False
    elements = prod(n for n, stride in zip(tensor.size(), tensor.stride(), strict=True) if stride)
    return elements * tensor.itemsize < nbytes


def taken_by(tensor: Tensor, nbytes: int) -> int:
    """Return what `Known.operation` is once so many bytes were taken for a tensor."""
    return _operation() if is_of_a_buffer(tensor, nbytes) else ANY


def may_be_outdated(tensor: Tensor, known: Known, saved: Saved) -> bool:
    """Return whether the copy may have other bytes than the tensor has now: either of the two is a part of a buffer."""
    # A copy that has not been made yet will have the bytes of that moment; and within an operation nothing is written.
    if saved.group.state is State.FILLING or known.operation == _operation():
        return False
    return known.operation != ANY or is_of_a_buffer(tensor, saved.nbytes)


def is_part(tensor: Tensor, saved: Saved) -> bool:
    """Return whether tensors saved right after this one may share its bytes; see `is_beside` of `native/storages.h`."""
    return tensor._base is None and tensor.grad_fn is None and tensor.nbytes < saved.nbytes


def was_written_on_another_stream(saved: Saved, tensor: Tensor, stream: Stream) -> bool:
    """Return whether the tensor was written by another stream than the one that its group waits for."""
    return saved.group.stream != stream and tensor._base is None
