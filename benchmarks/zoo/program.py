"""What the programs have in common: what `make` returns, and the few lines that every one of them would repeat."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint

PROGRAMS = (
    "ddp",
    "fsdp",
    "reference_gpt",
    "t5",
    "convnext",
    "llama",
    "gat",
    "moe",
    "bert",
    "large_gpt",
    "large_adamw",
    "large_masters",
    "unet",
    "resnet50",
    "vit",
    "dit",
    "swin",
    "whisper",
    "lstm",
    "lora",
    "large_lora",
    "dpo",
    "gan",
    "detector",
    "gpt",
    "reference_unet",
    "hf_t5",
    "hf_decoder",
    "hf_bert",
    "peft_lora",
    "pyg_gat",
)
"""In the order in which they are run: where time is short, it is for what tells most."""
Model = TypeVar("Model", bound=nn.Module)
SIZES = ("cpu", "full")


class Unavailable(RuntimeError):
    """A package that the program is written with is not installed."""


def its_own() -> Tensor:
    """The `Program.step` of a program whose trainer has the loop, which nobody can run a step at a time."""
    raise Unavailable("its trainer has the loop, so it cannot be run a step at a time")


@dataclass(frozen=True, slots=True)
class Program:
    """A program that is ready to train.

    Attributes
    ----------
    models
        All that have weights, frozen ones included.
    optimizers
        One for most, none where a trainer makes it.
    step
        Runs one step, which leaves no gradients, and returns the loss without its graph.
    loop
        Runs so many steps, and calls what it is given with the loss of each; None: calls `step` so often.
    """

    models: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    step: Callable[[], Tensor]
    loop: Callable[[int, Callable[[Tensor], None]], None] | None = None

    def train(self, steps: int, each: Callable[[Tensor], None]) -> None:
        """Run so many steps, and call `each` with the loss of each."""
        if self.loop is not None:
            self.loop(steps, each)
            return
        for _ in range(steps):
            each(self.step())

    def state(self) -> list[Tensor]:
        """Weights, buffers and what the optimizers keep: of this rank, and each once."""
        held: list[Any] = [t for model in self.models for t in (*model.parameters(), *model.buffers())]
        held += [x for optimizer in self.optimizers for kept in optimizer.state.values() for x in kept.values()]
        tensors = [_local(x) for x in held if isinstance(x, Tensor)]
        return list({t.untyped_storage().data_ptr() or id(t): t for t in tensors}.values())


def _local(x: Any) -> Tensor:
    local: Tensor = x.to_local() if hasattr(x, "to_local") else x  # what FSDP shards, without importing that
    return local.detach()


class Make(Protocol):
    def __call__(self, size: str, device: torch.device | str, checkpoint: bool = False) -> Program: ...


def module(name: str) -> ModuleType:
    """The file of a program.

    It has ``make``, and where it needs them ``NEEDS``, packages, and ``RANKS``, processes with a GPU each; ``OWN`` is
    False if it is checkpointed as it is, and cannot be any further.

    Raises
    ------
    ValueError
        If there is no program of this name.
    """
    if name not in PROGRAMS:
        raise ValueError(f"there is no program {name}; there are {', '.join(PROGRAMS)}")
    return importlib.import_module(f"benchmarks.zoo.{name}")


def lacking(name: str) -> str | None:
    """Why a program cannot run here, or None if it can."""
    missing = [package for package in getattr(module(name), "NEEDS", ()) if find_spec(package) is None]
    return f"{' and '.join(missing)}: not installed" if missing else None


def ranks(name: str) -> int:
    """How many processes a program is."""
    return int(getattr(module(name), "RANKS", 1))


def has_own(name: str) -> bool:
    """Whether a program has a checkpointing to switch on."""
    return bool(getattr(module(name), "OWN", True))


def maker(name: str) -> Make:
    """The `make` of a program.

    Raises
    ------
    ValueError
        If there is no program of this name.
    Unavailable
        If a package is not installed that it needs.
    """
    why = lacking(name)
    if why is not None:
        raise Unavailable(why)
    make: Make = module(name).make
    return make


def seeded(device: torch.device | str, seed: int = 0) -> torch.Generator:
    """Seed the weights and dropout, and return a generator for the batches, which are drawn on the device."""
    torch.manual_seed(seed)
    return torch.Generator(device).manual_seed(seed + 1)


def block(on: bool, function: Callable[..., Any], *inputs: Any) -> Any:
    """Call a block of the model, checkpointed if that is on."""
    return checkpoint(function, *inputs, use_reentrant=False) if on else function(*inputs)


def package(name: str) -> Any:
    """A package that need not be installed, and whose types nobody checks."""
    return importlib.import_module(name)


def channels_last(model: Model) -> Model:
    """Lay out the weights of its convolutions as their fastest kernels want them."""
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def enable_checkpointing(model: Any) -> None:
    """Turn on what a model of `transformers` has itself; its later versions warn of the name that earlier ones have."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def join(device: torch.device) -> tuple[int, torch.device]:
    """Join the processes that a launcher has started, or be the only one; this one's rank and its device."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if distributed.is_initialized():
        pass
    elif "RANK" in os.environ:
        distributed.init_process_group(backend)
    else:
        distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return distributed.get_rank(), device
