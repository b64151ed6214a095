"""A weight as it was found: its storage, as long as that is what it was."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef


class Weight:
    """A parameter or buffer, without keeping it alive.

    Attributes
    ----------
    nbytes : int
        Of its storage.
    address : int
        Where that begins.
    """

    __slots__ = ("_identity", "_ref", "address", "nbytes")

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._ref = TensorWeakRef(tensor)
        self._identity = storage._cdata
        self.address = storage.data_ptr()
        self.nbytes = storage.nbytes()

    def tensor(self) -> Tensor | None:
        """The tensor; None if it is gone, or has another storage by now, or that has moved."""
        tensor = self._ref()
        if tensor is None:
            return None
        storage = tensor.untyped_storage()
        is_same = storage._cdata == self._identity and storage.data_ptr() == self.address
        return tensor if is_same and storage.nbytes() == self.nbytes else None

    def storage(self) -> torch.UntypedStorage | None:
        """Its storage; None as for `tensor`."""
        tensor = self.tensor()
        return None if tensor is None else tensor.untyped_storage()
