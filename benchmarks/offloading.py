"""How fast does a GPT train whose optimizer state lies in host memory, beside the libraries that do only that?

``python -m benchmarks.offloading`` runs each way in a process of its own: plain PyTorch, torchao's
``CPUOffloadOptimizer`` and DeepSpeed's ZeRO-Offload, which update on the CPU and need their lines in the program, and
the plain program under tiers, in as much HBM as each of the two has taken. Ways whose package is not installed are left
out. ``--layers 44 --width 3072`` has four times the weights; with ``--hbm`` the plain programs run under tiers, too.

Printed are the HBM that is in use at the end, and the most after one of the first three steps; how much more host
memory is used at the end than at the beginning; the mean of the last 12 steps, and when the first step was over. A step
with tiers should take less than `bound` says, which is printed where the plain program has run before.

DeepSpeed keeps weights in bf16, with an fp32 copy in host memory; ``masters`` does the same in plain PyTorch. All
others have fp32 weights under autocast. torchao copies each gradient to the host when it is made, before anything
could clip it. So none of the ways clips.
"""

# mypy: no-warn-return-any
from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeAlias

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.gpt import GPT
from benchmarks.zoo.large_masters import Masters
from benchmarks.zoo.program import package, seeded
from torch_tiers.allocator.sizes import GiB, parse_size
from torch_tiers.session import current

VOCABULARY, HEAD = 32000, 128
FIRST = 3  # steps, in which tiers may take HBM beyond the budget as long as there is some, as it learns
TIMED = 12  # steps between two events: nothing waits for the device in between
LR = 1e-4

Step: TypeAlias = Callable[[Tensor], Tensor]
"""Trains on tokens of shape (batch, length + 1), and returns the loss."""


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def autocast(model: nn.Module) -> Step:
    """Fp32 weights, plain PyTorch."""
    return _under_autocast(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True))


def torchao(model: nn.Module) -> Step:
    """Fp32 weights, updated on the CPU as soon as a gradient is there."""
    offloaded = package("torchao.optim").CPUOffloadOptimizer
    return _under_autocast(model, offloaded(model.parameters(), torch.optim.AdamW, lr=LR, offload_gradients=True))


def _under_autocast(model: nn.Module, optimizer: Any) -> Step:
    def step(tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            loss = _loss(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def masters(model: nn.Module) -> Step:
    """Bf16 weights with an fp32 copy, plain PyTorch."""
    model.to(torch.bfloat16)
    optimizer = Masters(model.parameters(), lr=LR)

    def step(tokens: Tensor) -> Tensor:
        loss = _loss(model, tokens)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def deepspeed(model: nn.Module) -> Step:
    """Bf16 weights with an fp32 copy in host memory, where DeepSpeed's AdamW runs."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 1e-2}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        "bf16": {"enabled": True},
    }
    engine, *_ = package("deepspeed").initialize(
        model=model, model_parameters=list(model.parameters()), config=config, dist_init_required=True
    )

    def step(tokens: Tensor) -> Tensor:
        loss = _loss(engine, tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return int(any_port.getsockname()[1])


WAYS: dict[str, Callable[[nn.Module], Step]] = {
    "autocast": autocast,
    "torchao": torchao,
    "masters": masters,
    "deepspeed": deepspeed,
}
PEERS = {"torchao": "autocast", "deepspeed": "masters"}
"""The plain program that does as each of the libraries."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model and its batch."""

    layers: int
    width: int
    batch: int
    length: int
    vocabulary: int = VOCABULARY


def train(way: str, shape: Shape, steps: int, device: torch.device) -> dict[str, Any]:
    """Train for so many steps of which the last ones are timed: seconds a step, seconds to begin, bytes and loss."""
    began, used = time.perf_counter(), psutil.virtual_memory().used
    cuda = device.type == "cuda"
    generator = seeded(device)
    torch.zeros(1, device=device)  # CUDA is initialised
    others = _hbm(cuda)
    with device:
        heads = max(1, shape.width // HEAD)
        model = GPT(shape.layers, shape.width, heads, shape.length, shape.vocabulary, checkpoint=True)
    step = WAYS[way](model)
    loss, started, timed, first, streamed = torch.zeros(()), 0.0, 0.0, 0, 0
    for number in range(steps):
        if number == steps - TIMED:
            timed = _now(cuda)
        size = (shape.batch, shape.length + 1)
        loss = step(torch.randint(shape.vocabulary, size, device=device, generator=generator))
        if number == 0:
            started = _now(cuda) - began
        if number < FIRST:
            first = max(first, _hbm(cuda) - others)
        if number == steps - TIMED - 1:
            streamed = _streamed()
    seconds = (_now(cuda) - timed) / TIMED
    return {
        "seconds": seconds,
        "start": started,
        "streamed": (_streamed() - streamed) / TIMED,
        "hbm": _hbm(cuda) - others,  # allocators keep what they have
        "at first": first,
        "host": psutil.virtual_memory().used - used,
        "loss": loss.item(),
        **(_alone(way, model, shape, device) if way in PEERS.values() and cuda and current() is None else {}),
    }


def _streamed() -> int:
    """Bytes of state that tiers has copied to HBM so far. As many were copied back."""
    session = current()
    return 0 if session is None else int(session.stats()["moved"].get("state_read", 0))


def _alone(way: str, model: nn.Module, shape: Shape, device: torch.device) -> dict[str, float]:
    """Seconds of a forward alone, and bytes a second each way over the link, both ways at once."""
    tokens = torch.zeros(shape.batch, shape.length + 1, dtype=torch.int64, device=device)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=way == "autocast"):
        _loss(model, tokens)
        began = _now(True)
        _loss(model, tokens)
        forward = _now(True) - began
    kinds: list[dict[str, Any]] = [{"device": device}, {"pin_memory": True}]
    pairs = [[torch.empty(GiB // 4, dtype=torch.uint8, **kind) for kind in order] for order in (kinds, kinds[::-1])]
    streams = [torch.cuda.Stream() for _ in pairs]
    began = _now(True)
    for _ in range(16):
        for stream, (source, target) in zip(streams, pairs, strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
    return {"forward": forward, "rate": 16 * (GiB // 4) / (_now(True) - began)}


def bound(plain: dict[str, Any], tiers: dict[str, Any]) -> float:
    """The most seconds that a step should take: plain's, and the time on the link that exceeds a forward; 15% more.

    A forward could hide that much of the copies, though none runs beside it today.
    """
    exposed = max(0.0, tiers["streamed"] / plain["rate"] - plain["forward"])
    return float(1.15 * (plain["seconds"] + exposed))


def _hbm(cuda: bool) -> int:
    """Bytes of HBM in use, whoever's they are: PyTorch counts as reserved what tiers has in DRAM, too."""
    if not cuda:
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def _now(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def run(way: str, arguments: list[str], hbm: int) -> dict[str, Any] | None:
    """Train in a process of its own, under tiers where `hbm` is a budget; None, and a line, if it fails."""
    own = {name: value for name, value in os.environ.items() if hbm or not name.startswith("TIERS_")}
    tiers = {"TIERS_ALLOCATOR": "pages", "TIERS_HBM": str(hbm), "TIERS_PLAN_CACHE": "0"} if hbm else {}
    command = [sys.executable, "-m", "benchmarks.offloading", "--only", way, *arguments]
    done = subprocess.run(command, env={**own, **tiers}, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{way} failed: {(done.stderr.splitlines() or [f'code {done.returncode}'])[-1]}", flush=True)
        return None
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def compare(ways: Iterable[str], arguments: list[str], rounds: int, hbm: int) -> None:
    """Run the ways in turn, tiers in as much HBM as each library took, or in `hbm`, and print a line for each run."""
    names = f"{'HBM, GiB':>10}{'at first':>10}{'host, GiB':>11}{'ms a step':>11}{'first step, s':>15}{'loss':>9}"
    print(f"{'way':20}{names}")
    for _ in range(rounds):
        by_way: dict[str, dict[str, Any]] = {}
        for way in ways:
            if way in PEERS and find_spec(way) is None:
                print(f"{way} is not installed", flush=True)
            elif measured := _said(way, run(way, arguments, 0)):
                by_way[way] = measured
                budget = max(measured["hbm"], measured["at first"]) if way in PEERS else hbm
                plain = PEERS.get(way, way)
                tiers = _said(f"{plain} with tiers", run(plain, arguments, budget)) if budget else None
                if tiers and "rate" in by_way.get(plain, {}):  # it has run before
                    print(f"{'  which is to be below':51}{1e3 * bound(by_way[plain], tiers):11.0f}", flush=True)


def _said(name: str, measured: dict[str, Any] | None) -> dict[str, Any] | None:
    if measured is not None:
        memory = f"{measured['hbm'] / GiB:10.1f}{measured['at first'] / GiB:10.1f}{measured['host'] / GiB:11.1f}"
        times = f"{1e3 * measured['seconds']:11.0f}{measured['start']:15.1f}"
        print(f"{name:20}{memory}{times}{measured['loss']:9.4f}", flush=True)
    return measured


def main() -> None:
    """Compare the ways, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--hbm", type=parse_size, default=0, help="in which the plain programs run with tiers, too")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps <= TIMED:
        parser.error(f"--steps: more than the {TIMED} that are timed are needed")
    shape = Shape(options.layers, options.width, options.batch, options.length, options.vocabulary)
    if options.only is None:
        sizes = ("layers", "width", "batch", "length", "vocabulary", "steps", "device")
        arguments = [f"--{name}={getattr(options, name)}" for name in sizes]
        compare(options.ways, arguments, options.rounds, options.hbm)
        return
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not get between
    print(json.dumps(train(options.only, shape, options.steps, torch.device(options.device))), file=answers, flush=True)


if __name__ == "__main__":
    main()
