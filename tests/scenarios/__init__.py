"""Programs that once broke a tool like this one, each with what must hold.

A module of this folder is a family of scenarios: public functions that take the device and raise
AssertionError where something does not hold. They print what they saw. ``python -m tests.scenarios.FAMILY
[SCENARIO ...] [--device cuda]`` runs them in a process of their own; exit code 0 means that all held.
"""

from __future__ import annotations

import argparse
import atexit
import copy
import gc
import importlib
import inspect
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import torch_tiers as tiers
from tests.programs import deterministic_kernels
from torch_tiers import assembly
from torch_tiers.allocator.sizes import KiB, MiB
from torch_tiers.assembly import Session
from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.migrator.planner.build import plan_of
from torch_tiers.migrator.planner.effects import effect
from torch_tiers.migrator.planner.schedule import scheduled
from torch_tiers.migrator.policies import POLICIES, Policy
from torch_tiers.migrator.runtime import devices, streamed_state
from torch_tiers.migrator.runtime import streamed_weights as of_runtime
from torch_tiers.migrator.saved import learning_room
from torch_tiers.migrator.state import chunks, parameter_state, slices
from torch_tiers.migrator.state.parameter_state import ParameterState
from torch_tiers.migrator.streams.pieces import SLOT

PAGES_HBM = "1GiB"  # of the allocator, in families that run on it

Scenario: TypeAlias = Callable[[torch.device], None]
Program: TypeAlias = Callable[[torch.device], Sequence[Tensor]]

FAMILIES = (
    "between_passes",
    "bypassed",
    "changed_programs",
    "compiled",
    "direct",
    "disk",
    "early_backwards",
    "exceptions",
    "functional",
    "graphs",
    "hooks",
    "iterations",
    "leaks",
    "mixed",
    "monitor",
    "odd_modules",
    "optimizers",
    "own_ways",
    "processes",
    "quantized",
    "recompute",
    "replayed",
    "sessions",
    "storages",
    "streaming",
    "streaming_choices",
    "subclasses",
    "surprises",
    "threads",
    "timeline",
    "version_check",
    "weights",
    "without_modules",
)
ON_GPU = ("pages",)
"""Families that need a GPU."""


def scenarios(family: str) -> dict[str, Scenario]:
    """Return the scenarios of a family by name, in the order in which they are written."""
    module = importlib.import_module(f"{__name__}.{family}")
    return {
        name: function
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
    }


def main(family: str) -> None:
    """Run the scenarios named on the command line, or all of the family; exit with 1 if one did not hold."""
    # cuBLAS reads this at its first use, which may be long before the first program that wants determinism.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TIERS_PLAN_CACHE", "0")  # what one scenario learned is no other's
    if "TIERS_LEDGER" not in os.environ:  # what other programs of this user hold is none of theirs
        directory = tempfile.TemporaryDirectory(prefix="tiers-ledger-")
        atexit.register(directory.cleanup)
        os.environ["TIERS_LEDGER"] = directory.name
    known = scenarios(family)
    parser = argparse.ArgumentParser(prog=f"python -m {__name__}.{family}")
    parser.add_argument("names", nargs="*", metavar="SCENARIO", help=", ".join(known))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--allocator", choices=("torch", "pages"), default="torch")
    arguments = parser.parse_args()
    if arguments.allocator == "pages":  # before CUDA is initialised, and then for good
        with tiers.session(allocator="pages", hbm=PAGES_HBM, dram="4GiB"):
            torch.cuda.init()
        assert torch.cuda.get_allocator_backend() == "tiers", "the allocator is not ours"
    broken = []
    for name in arguments.names or known:
        print(f"{family}.{name}", flush=True)
        try:
            known[name](torch.device(arguments.device))
        except (Exception, pytest.fail.Exception):
            traceback.print_exc(file=sys.stdout)
            broken.append(name)
    if broken:
        sys.exit(f"did not hold: {', '.join(broken)}")


# ------------------------------------------------------------------------------------------ sessions


@contextmanager
def moving(
    *,
    room: int = MiB,
    share: float = 1,
    recompute: bool = False,
    paced: bool = False,
    tier: str | None = None,
    policy: str = "move",
    plan: Policy | None = None,
    **arguments: Any,
) -> Iterator[Session]:
    """Open a session in which a share of the storages moves, and few bytes of those may lie in HBM at once.

    A budget as small as the programs here cannot be set on a GPU, where libraries take more for themselves.
    So the budget is left open, and what derives the room from it is replaced: before and after there is a plan.

    Parameters
    ----------
    room
        Bytes of saved tensors that may lie in HBM besides those that stay.
    share
        Of the storages, evenly spread, once there is a plan; before that everything moves.
    recompute
        What can be recomputed does not move, but is.
    paced
        The plan's room changes on the way, and groups come back at its triggers.
    tier
        Where what moves goes, once there is a plan.
    plan
        Makes the plans, instead of all this.
    """

    def move_a_share(trace: Trace, budget: int, links: Links) -> Plan:
        lives = trace.lifetimes
        goes = {life.ident: int((k + 1) * share) > int(k * share) for k, life in enumerate(lives)}
        stays = sum(life.nbytes for life in lives if not goes[life.ident])
        again = set(trace.recipes) & set(goes) if recompute else set()
        outcome = effect(trace, again)
        made = plan_of("move", outcome, {ident for ident in goes if goes[ident]}, room)
        if tier is not None:
            made = replace(made, groups=tuple(replace(group, tier=tier) for group in made.groups))
        if paced:
            return scheduled(made, trace, outcome, max(trace.others) + stays + room)
        return replace(made, room=stays + room)

    with (
        mock.patch.object(learning_room, "learning_room", lambda *_: room),
        mock.patch.object(devices, "POLICIES", {**POLICIES, "move": plan or move_a_share}),
        mock.patch.object(assembly, "recomputes", lambda name: recompute or plan is not None),
        tiers.session(policy=policy, **{"allocator": "torch", "dram": "64MiB", **arguments}) as session,
    ):
        yield session


@contextmanager
def streamed() -> Iterator[None]:
    """Have all weights streamed, in the sessions that are open meanwhile, whatever the budget.

    On a GPU they are streamed from where they lie, as they are too small to have a page of DRAM for themselves.
    """
    with (
        mock.patch.object(of_runtime.StreamedWeights, "residence", lambda *_: None),
        mock.patch.object(of_runtime, "may_lie_in_dram", lambda *_: True),
        mock.patch.object(of_runtime, "may_be_streamed", lambda nbytes, *_: nbytes > 0),
        mock.patch.object(of_runtime, "fit", lambda *_: False),
        mock.patch.object(of_runtime, "buffer_bytes", lambda sizes, _: 3 * max(sizes, default=0)),
    ):
        yield


class _StateInDram:
    """Where state and parameters seem to lie in DRAM, and buffers in HBM, but for a part."""

    def dram_bytes(self, address: int) -> int:
        return 1

    def longest_in_hbm(self, address: int, nbytes: int) -> tuple[int, int]:
        return SLOT, nbytes - SLOT  # the rest lies in DRAM

    def note_streamed(self, nbytes: dict[int, int]) -> None:
        pass


def _with_parameters(optimizer: torch.optim.Optimizer, masters: frozenset[int]) -> Iterator[ParameterState]:
    """All parameters pass for master weights."""
    updated = frozenset(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
    return parameter_state.all_states(optimizer, masters | updated)


@contextmanager
def state_streamed() -> Iterator[None]:
    """Have parameters and their state come through a buffer for updates, in chunks, as if they lay in DRAM."""
    with (
        mock.patch.object(streamed_state.StreamedState, "residence", lambda *_: _StateInDram()),
        mock.patch.object(streamed_state, "all_states", _with_parameters),
        mock.patch.object(parameter_state, "LEAST", 64),
        mock.patch.object(chunks, "ALIGNED", 256),
        mock.patch.object(slices, "SLICE", 20 * KiB),
        mock.patch.object(streamed_state, "SLICE", 20 * KiB),
    ):
        yield


def moved(session: Session) -> dict[str, int]:
    """Return the bytes moved so far, by lane."""
    return session.stats()["moved"]


def bytes_streamed(session: Session) -> int:
    """Bytes of weights that were copied so far."""
    return moved(session).get("weights", 0)


def assert_same_streamed(program: Program, device: torch.device) -> None:
    """Check that a program yields what it yields without tiers, with all its weights streamed."""
    with deterministic_kernels():
        plain = bits(program(device))
        with streamed(), tiers.session(allocator="torch", dram="64MiB") as session:
            ours = bits(program(device))
            streamed_bytes = bytes_streamed(session)
    differ = [k for k, (a, b) in enumerate(zip(plain, ours, strict=True)) if a != b]
    print(f"  {len(plain)} results; {streamed_bytes} bytes streamed; these differ: {differ}")
    assert streamed_bytes > 0, "nothing was streamed, so nothing was tested"
    assert not differ


def step(model: nn.Module, device: torch.device, i: int, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    optimizer.zero_grad()
    loss = model(batch(device, i)).square().mean()
    loss.backward()
    results = [loss.detach().clone(), *gradients(model)]
    optimizer.step()
    return results


def recomputed(session: Session) -> set[str]:
    """Return the keys of the sites whose tensors this thread's plans drop and make again."""
    saver = session.runtime.saver()
    assert saver is not None
    return {key for mover in saver.movers.armed for plan in mover.learner.plans for key in plan.recompute}


REMADE: dict[str, Any] = {"recompute": True, "share": 0}
"""Arguments of `moving`: all that can be is dropped and made again, and nothing moves."""


# ------------------------------------------------------------------------------------------- results


def bits(tensors: Sequence[Tensor]) -> list[bytes]:
    """Return the contents of tensors, so that they compare bitwise, NaN included."""
    return [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def assert_same(program: Program, device: torch.device, *, moves: bool = True, **arguments: Any) -> dict[str, Any]:
    """Check that a program yields what it yields without tiers; return the session's stats.

    Where results differ it runs once more without tiers: the program may not even equal itself. With `moves`
    it must also have brought something back.
    """
    with deterministic_kernels():
        plain = bits(program(device))
        with moving(**arguments) as session:
            ours = bits(program(device))
            stats = session.stats()
        differ = [k for k, (a, b) in enumerate(zip(plain, ours, strict=True)) if a != b]
        assert not differ or bits(program(device)) == plain, "the program does not equal itself"
        assert not differ, f"of {len(plain)} results these differ with tiers: {differ}"
    print(f"  {len(plain)} results equal; moved {stats['moved']} in {stats['iterations']} iterations")
    assert not moves or stats["moved"]["h2d"] > 0, "nothing moved, so nothing was tested"
    return stats


# -------------------------------------------------------------------------------------------- models


def perceptron(device: torch.device, *, width: int = 128, depth: int = 4, seed: int = 0) -> nn.Sequential:
    """Return a model that saves 1 MiB a layer of `batch`'s inputs."""
    torch.manual_seed(seed)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers).to(device)


class Block(nn.Module):
    """Adds to its input what its layers make of it, times a scale."""

    def __init__(self, *extra: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(128, 256), *extra, nn.Tanh(), nn.Linear(256, 128), nn.Dropout(0.1))
        self.inner: list[StorageWeakRef] = []

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        h = self.layers(x)
        self.inner.append(StorageWeakRef(h.untyped_storage()))
        return x + (h if scale is None else h * scale)


class Own(nn.Module):
    """Dynamo compiles the forwards of others' modules, and leaves PyTorch's own as they are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def blocks(device: torch.device, *extra: nn.Module) -> nn.Sequential:
    """Return three blocks, each with a copy of the `extra` layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(*copy.deepcopy(extra)) for _ in range(3))).to(device)


@contextmanager
def new_objects() -> Iterator[Callable[[type], int]]:
    """Count objects of a type among those made within; to look at all that there are takes 0.1 s each time."""
    gc.collect()
    gc.freeze()
    try:
        yield lambda wanted: sum(type(each) is wanted for each in gc.get_objects())
    finally:
        gc.unfreeze()


def batch(device: torch.device, i: int, *, rows: int = 2048, width: int = 128) -> Tensor:
    """Return the input of step `i`."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(i)).to(device)


def train(
    model: nn.Module,
    device: torch.device,
    *,
    steps: int = 4,
    loss_of: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x).square().mean(),
) -> list[Tensor]:
    """Train for `steps` steps; return every loss and every gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for i in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, batch(device, i))
        loss.backward()
        optimizer.step()
        results += [loss.detach(), *gradients(model)]
    return results


def gradients(model: nn.Module) -> list[Tensor]:
    """Return copies of the gradients that there are."""
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]
