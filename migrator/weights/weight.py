"""A weight as it was found: its storage, and where a module has it, as long as that is what it was."""

from __future__ import annotations

from weakref import ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef


class Weight:
    """The storage of a parameter, without keeping it alive.

    No reference to the tensor: PyTorch does not swap a tensor that somebody has a weak one to.

    Parameters
    ----------
    tensor : Tensor
        The parameter, or a DTensor's local shard.
    module : nn.Module, optional
        Who has the parameter.
    name : str
        Under which name.

    Attributes
    ----------
    identity : int
        Of the storage, as long as it lives.
    nbytes : int
        Of the storage.
    address : int
        Where it begins.
    """

    __slots__ = ("_module", "_name", "_ref", "address", "identity", "nbytes")

    def __init__(self, tensor: Tensor, module: nn.Module | None = None, name: str = "") -> None:
        storage = tensor.untyped_storage()
        self._ref = StorageWeakRef(storage)
        self._module = None if module is None else ref(module)
        self._name = name
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

    def is_in_use(self) -> bool:
        """Whether it is still what its module reads: not though an optimizer alone keeps it alive."""
        if self._module is not None:
            module = self._module()
            now = None if module is None else module._parameters.get(self._name)
            # While `torch.func` calls a module it has others in their place, which are no parameters.
            if module is None or (type(now) is nn.Parameter and now.untyped_storage()._cdata != self.identity):
                return False
        return self.storage() is not None
