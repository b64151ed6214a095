"""Tensors that share what was taken of a storage: whether the next one may, too.

Views share the version counter of their base, so what was taken for one has the bytes of the next. But no counter tells
what is written by `.data`, and torchdiffeq fills a buffer so, column by column, and saves what there is of it. Such a
buffer has no graph, and what has none is all that is suspected: the parts of a fused projection are saved once.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from torch_tiers.migrator.offload.group import Saved, State
from torch_tiers.migrator.recording.storages import Known
from torch_tiers.migrator.streams import Stream

ANY = -1
"""`Known.operation` of what may be shared by tensors that any operation saves."""

_operation = torch._C._autograd._get_sequence_nr
"""Tells operations of this thread apart, of those that save anything."""


def is_of_a_buffer(tensor: Tensor, nbytes: int) -> bool:
    """Return whether a tensor views some of so many bytes alone, of a tensor without a graph."""
    if tensor.nbytes == nbytes or not tensor._is_view() or tensor._base is None or tensor._base.requires_grad:
        return False
    elements = prod(n for n, stride in zip(tensor.size(), tensor.stride(), strict=True) if stride)
    return elements * tensor.itemsize < nbytes


def taken_by(tensor: Tensor, nbytes: int) -> int:
    """Return what `Known.operation` is once so many bytes were taken for a tensor."""
    return _operation() if is_of_a_buffer(tensor, nbytes) else ANY


def may_have_changed(known: Known, saved: Saved) -> bool:
    """Return whether what was taken for a part of a buffer has left, so that its other bytes may be older by now."""
    # What has not left leaves as it is then, for all that share it; and within an operation nothing is written.
    return saved.group.state is not State.FILLING and known.operation != _operation()


def is_part(tensor: Tensor, saved: Saved) -> bool:
    """Return whether tensors saved right after this one may share its bytes; see `is_beside` of `native/storages.h`."""
    return tensor._base is None and tensor.grad_fn is None and tensor.nbytes < saved.nbytes


def is_another_stream_s(saved: Saved, tensor: Tensor, stream: Stream) -> bool:
    """Return whether the tensor was written by another stream than the one that its group waits for."""
    return saved.group.stream != stream and tensor._base is None
