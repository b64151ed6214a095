"""Layers, as papers on chains of them see a trace: what one call of a module saved. Pure functions on plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from torch_tiers.migrator.model.trace import Site, Trace

CONVOLUTIONS = frozenset(f"{name}{n}d" for name in ("Conv", "ConvTranspose", "LazyConv") for n in (1, 2, 3))
ACTIVATIONS = frozenset(
    {
        *("CELU", "ELU", "GELU", "GLU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU", "Mish"),
        *("PReLU", "RReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "LogSigmoid", "Softplus", "Softshrink"),
        *("Softsign", "Tanh", "Tanhshrink", "Threshold", "Softmax", "Softmax2d", "Softmin", "LogSoftmax"),
    }
)


@dataclass(frozen=True, slots=True)
class Layer:
    """One call of a module that saved something.

    Attributes
    ----------
    path, kind : str
        The module's path and class.
    sites : tuple of Site
        What it saved, in order.
    entered : int or None
        Position at which backward enters it; None if it never does.
    seconds : float
        Its forward, up to its last save, from the last save of the layer before it; 0 if not measured.
    """

    path: str
    kind: str
    sites: tuple[Site, ...]
    entered: int | None
    seconds: float

    @property
    def birth(self) -> int:
        """Position of its first save."""
        return self.sites[0].birth


def layers(trace: Trace) -> tuple[Layer, ...]:
    """The layers of a trace, in the order of the forward."""
    times: Sequence[float] = trace.times or (0.0,) * trace.positions
    found, before = [], 0.0
    for (path, kind), run in groupby(trace.sites, key=lambda site: (site.key.rpartition(":")[0], site.kind)):
        sites = tuple(run)
        entered = min((site.uses[0] for site in sites if site.uses), default=None)
        now = times[sites[-1].birth]
        found.append(Layer(path, kind, sites, entered, now - before))
        before = now
    return tuple(found)
