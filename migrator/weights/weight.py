"""A weight as it was found: its storage, as long as that is what it was."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Weight:
    """The storage of a parameter, without keeping it alive.

    No reference to the tensor: PyTorch does not swap a tensor that somebody has a weak one to.

    Attributes
    ----------
    identity : int
        Of the storage, as long as it lives.
    nbytes : int
        Of the storage.
    address : int
        Where it begins.
    """

    __slots__ = ("_ref", "address", "identity", "nbytes")

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._ref = StorageWeakRef(storage)
        self.identity = storage._cdata
        self.address = storage.data_ptr()
        self.nbytes = storage.nbytes()

    def storage(self) -> torch.UntypedStorage | None:
        """The storage; None if it is gone, or has other memory by now."""
        if self._ref.expired():
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self._ref.cdata)
        is_same = storage is not None and storage.data_ptr() == self.address and storage.nbytes() == self.nbytes
        return storage if is_same else None
