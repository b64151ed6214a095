"""What the programs have in common: what `make` returns, and the few lines that every one of them would repeat."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

PROGRAMS = (
    "gpt",
    "resnet50",
    "unet",
    "dit",
    "vit",
    "swin",
    "convnext",
    "t5",
    "decoder",
    "bert",
    "whisper",
    "lstm",
    "gat",
    "moe",
    "lora",
    "dpo",
    "gan",
    "detector",
)
Model = TypeVar("Model", bound=nn.Module)
SIZES = ("cpu", "full")


class Unavailable(RuntimeError):
    """A package that the program is written with is not installed."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program that is ready to train.

    Attributes
    ----------
    models
        All that have weights, frozen ones included.
    optimizers
        One for most.
    step
        Runs one step, which leaves no gradients, and returns the loss without its graph.
    """

    models: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    step: Callable[[], Tensor]


class Make(Protocol):
    def __call__(self, size: str, device: torch.device | str, checkpoint: bool = False) -> Program: ...


def maker(name: str) -> Make:
    """The `make` of a program.

    Raises
    ------
    ValueError
        If there is no program of this name.
    """
    if name not in PROGRAMS:
        raise ValueError(f"there is no program {name}; there are {', '.join(PROGRAMS)}")
    make: Make = importlib.import_module(f"benchmarks.zoo.{name}").make
    return make


def seeded(device: torch.device | str, seed: int = 0) -> torch.Generator:
    """Seed the weights and dropout, and return a generator for the batches, which are drawn on the device."""
    torch.manual_seed(seed)
    return torch.Generator(device).manual_seed(seed + 1)


def block(on: bool, function: Callable[..., Any], *inputs: Any) -> Any:
    """Call a block of the model, checkpointed if that is on."""
    return checkpoint(function, *inputs, use_reentrant=False) if on else function(*inputs)


def transformers() -> Any:
    """The package of this name.

    Raises
    ------
    Unavailable
        If it is not installed.
    """
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise Unavailable(f"transformers cannot be imported: {error}") from None


def channels_last(model: Model) -> Model:
    """Lay out the weights of its convolutions as their fastest kernels want them."""
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def enable_checkpointing(model: Any) -> None:
    """Turn on what a model of `transformers` has itself; its later versions warn of the name that earlier ones have."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
