"""What a module consists of, as PyTorch has registered it.

A program may have something else under the names of `nn.Module`'s own methods: a list called `modules`, a `parameters`
that takes an argument, `named_modules` as it was years ago. So none of them is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import nn


def walk(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return the path and the object of every module within `root`, which comes first; each once, parents first.

    Without recursion: modules may lie deeper within each other than Python calls may.
    """
    seen = set[int]()
    left: list[tuple[str, nn.Module | None]] = [("", root)]
    while left:
        path, module = left.pop()
        if module is None or id(module) in seen:  # a child may have been set to None
            continue
        seen.add(id(module))
        yield path, module
        prefix = f"{path}." if path else ""
        left += reversed([(prefix + name, child) for name, child in module._modules.items()])


def tensors(root: nn.Module) -> Iterator[torch.Tensor]:
    """Return parameters and buffers of `root` and of all within it; one that several share comes several times."""
    for _, module in walk(root):
        registered = chain(module._parameters.items(), module._buffers.items())
        yield from (tensor for _, tensor in registered if tensor is not None)
