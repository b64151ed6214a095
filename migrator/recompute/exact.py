"""Which modules backward may run again: those whose forward is PyTorch's own, and reads only tensors and settings.

Any other forward is Python that may read state from anywhere, changed since. To look for such changes can never be
complete, and a difference that is found afterwards cannot be mended.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

_DRAWS = (_DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d, nn.MultiheadAttention, nn.RNNBase)
"""Classes that may draw random numbers. RReLU saves its noise before it is filled."""

_CALLS_OTHERS = (nn.TripletMarginWithDistanceLoss, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Classes that may be given a function of the program's."""


def is_exact(module: nn.Module) -> bool:
    """Whether a module and all within it are exactly classes of `torch.nn`, without hooks, randomness and buffers."""
    return next(module.buffers(), None) is None and all(map(_is_exact_itself, module.modules()))


def _is_exact_itself(module: nn.Module) -> bool:
    kind = type(module)
    if getattr(nn, kind.__name__, None) is not kind or isinstance(module, (*_DRAWS, *_CALLS_OTHERS)):
        return False
    # A program may have put a method of its own into the class or the instance; its globals tell whose it is, where
    # `functools.wraps` copies the name of the module.
    of = getattr(kind.forward, "__globals__", {}).get("__name__", "")
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return of.startswith("torch.nn.") and "forward" not in vars(module) and not any(hooks)
