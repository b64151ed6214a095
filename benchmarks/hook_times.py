"""How much of the host's time do the saved-tensor hooks take for a tensor that stays, and for one that moves?

``python -m benchmarks.hook_times [--profile]``

Pack and unpack together, on a GPT whose kernels are so short that the host decides its speed. On a CPU, where kernels
would push the hooks out of the caches, on a program that saves and computes nothing, and with lanes that copy nothing:
bookkeeping alone.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import pstats
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

import torch_tiers as tiers
from benchmarks import workloads
from benchmarks.alternate import host_us
from torch_tiers.migrator.planner.paces import Pace
from torch_tiers.migrator.runtime import devices
from torch_tiers.migrator.saved import native
from torch_tiers.migrator.saved.actions import Stay
from torch_tiers.migrator.saved.garbage import Allowance
from torch_tiers.migrator.saved.saver import Saver
from torch_tiers.migrator.saved.stack import Hooks, OnStack
from torch_tiers.migrator.streams import Event, Stream
from torch_tiers.migrator.streams.host import HostEvent
from torch_tiers.migrator.streams.pieces import Piece
from torch_tiers.migrator.telemetry.counters import Counters
from torch_tiers.migrator.telemetry.transfers import Transfer
from torch_tiers.places import cache_directory

LEARNING = 40
STEPS = 20


class HookTimer:
    """Adds up the host time that the saved-tensor hooks take, for those that stay and those that move.

    Not for what is recomputed: that is told apart in the hooks themselves.
    """

    def __init__(self) -> None:
        self.seconds = {"stay": 0.0, "move": 0.0}
        self.tensors = {"stay": 0, "move": 0}
        self._push = OnStack.push

    def __enter__(self) -> HookTimer:
        def push(saver: OnStack) -> None:
            hooks = saver.hooks
            saver.hooks = self._timed(saver)
            self._push(saver)
            saver.hooks = hooks

        OnStack.push = push  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        OnStack.push = self._push  # type: ignore[method-assign]

    def _timed(self, saver: OnStack) -> Hooks:
        """What PyTorch is to call instead."""
        clock, (pack, unpack) = time.perf_counter, saver.hooks

        def timed_pack(tensor: torch.Tensor) -> Any:
            start = clock()
            packed = pack(tensor)
            kind = "stay" if type(packed) is tuple else "move"
            self.seconds[kind] += clock() - start
            self.tensors[kind] += 1
            return packed

        def timed_unpack(packed: Any) -> torch.Tensor:
            start = clock()
            tensor = unpack(packed)
            self.seconds["stay" if type(packed) is tuple else "move"] += clock() - start
            return tensor

        timed_pack.__self__ = timed_unpack.__self__ = saver  # type: ignore[attr-defined]
        return timed_pack, timed_unpack


class IdleLane:
    """Says that everything is copied."""

    def __init__(self, name: str, counters: Counters) -> None:
        self._done = HostEvent()
        self._done.set()

    def copy(self, pieces: Iterable[Piece], after: Sequence[Event], behind: Stream = None) -> HostEvent:
        return self._done

    def over(self, since: Event) -> list[Transfer]:
        return []

    def close(self) -> None:
        pass


@contextlib.contextmanager
def without_copies() -> Iterator[None]:
    """Where there is no GPU, lanes that do nothing."""
    if torch.cuda.is_available():
        yield
        return
    with mock.patch.object(devices, "HostLane", IdleLane):
        yield


def hook_times(step: Callable[[], torch.Tensor], arguments: dict[str, str], *, by_call: bool = False) -> str:
    """Microseconds of host time per saved tensor, pack and unpack together: the median over steps."""
    timer = HookTimer()
    with without_copies(), timer, tiers.session(allocator="torch", plan_cache=False, **arguments):
        for _ in range(LEARNING):
            step()
        of_steps: dict[str, list[float]] = {"stay": [], "move": []}
        for _ in range(STEPS):
            if torch.cuda.is_available():
                # Everything moves, so the link is far behind the host; a call that finds its queue full waits for it.
                torch.cuda.synchronize()
            timer.seconds, timer.tensors = {"stay": 0.0, "move": 0.0}, {"stay": 0, "move": 0}
            step()
            for kind, count in timer.tensors.items():
                if count:
                    of_steps[kind].append(1e6 * timer.seconds[kind] / count)
        if by_call:
            with cProfile.Profile() as profile:
                step()
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    return ", ".join(
        f"{kind} {median(times):.1f} us (best step {min(times):.1f})" for kind, times in of_steps.items() if times
    )


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.empty(256, 256))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (_,) = ctx.saved_tensors
        return grad


class _Layer(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = _Save.apply(x)
        return x


def saves_only() -> Callable[[], torch.Tensor]:
    """Make a step that saves as many tensors of as many bytes as the small GPT, and computes nothing."""
    model, x = torch.nn.Sequential(*(_Layer() for _ in range(24))), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([x])

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(x)
        loss.backward()
        optimizer.step()
        return loss

    return step


def counted_times(tensors: int = 200, rounds: int = 200) -> tuple[float, float]:
    """Microseconds for a tensor that stays, alone and where an engine counts it; the least, with all in the caches."""
    library = native.load(native.MODULE.build(cache_directory()))
    saver = Saver(lambda device: None, lambda *_: None, lambda *_: None, Allowance(), library)
    mover: Any = SimpleNamespace(engine=SimpleNamespace(hbm=library.Occupancy({}, deque())))
    x = torch.randn(64, 64, requires_grad=True).exp()
    paces = [Pace(number, 2 * tensors - number, 1 << 40, 1 << 40) for number in range(tensors)]
    found = []
    for actions in ([Stay(mover, 0, 0)] * tensors, [Stay(mover, 4096, 4096, pace) for pace in paces]):
        saver.adopt((f":{number}", action) for number, action in enumerate(actions))
        pack, unpack = saver.hooks
        times = []
        for _ in range(rounds):
            saver.place.iteration += 1
            saver.place.in_backward = False
            saver.place.here.begin(saver.place)
            mover.engine.hbm.position = -1
            start = time.thread_time()
            packed = [pack(x) for _ in range(tensors)]
            saver.place.in_backward = True
            for one in reversed(packed):
                unpack(one)
            times.append(time.thread_time() - start)
        found.append(1e6 * min(times) / tensors)
    return found[0], found[1]


def report(dram: str, *, by_call: bool = False) -> None:
    """Print the numbers, each under the policy that brings it about."""
    print(f"host {host_us():.0f} us", flush=True)
    alone, counted = counted_times()
    print(f"a tensor that stays: {alone:.2f} us, and {counted:.2f} where it is counted as others move", flush=True)
    step = workloads.small_gpt("cuda").step if torch.cuda.is_available() else saves_only()
    for policy in ("auto", "move"):  # with room for everything the first keeps it all
        times = hook_times(step, {"policy": policy, "dram": dram}, by_call=by_call)
        print(f"hooks, policy {policy}, host time a tensor, pack and unpack together: {times}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true", help="also what one step calls, by cProfile")
    parser.add_argument("--dram", default="4GiB")
    options = parser.parse_args()
    report(options.dram, by_call=options.profile)


if __name__ == "__main__":
    main()
