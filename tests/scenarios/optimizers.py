"""Optimizers have the plain program's parameters, losses and state, with all weights and all state streamed."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import torch_tiers as tiers
from tests.programs import deterministic_kernels
from tests.scenarios import batch, bits, main, state_streamed, streamed

STEPS = 20
FUSED: dict[str, dict[str, Any]] = {
    "Adam": {"fused": True},
    "AdamW": {"fused": True},
    # With momentum it fails where a gradient was missing in the first step, as PyTorch has it.
    "SGD": {"fused": True, "momentum": 0, "nesterov": False},
    "Adagrad": {"fused": True},
}
HYPER: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "Adam": {"lr": 1e-2, "amsgrad": True},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adagrad": {"lr": 0.1},
    "RMSprop": {"lr": 1e-2, "momentum": 0.5, "centered": True},
    "NAdam": {"lr": 1e-2},
    "Adafactor": {"lr": 1e-2},
    "Muon": {"lr": 1e-2},
    "Adadelta": {"lr": 1.0},
    "Adamax": {"lr": 1e-2},
    "ASGD": {"lr": 1e-2},
    "RAdam": {"lr": 1e-2},
    "Rprop": {"lr": 1e-2},
}


class Model(nn.Module):
    """Has a frozen layer, and one that gets no gradient in every third step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(128, 64), nn.Linear(64, 64), nn.Linear(64, 32)
        self.seldom = nn.Linear(64, 64, bias=False)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, i: int) -> Tensor:
        h = torch.relu(self.frozen(self.first(x)))
        return self.last(h if i % 3 == 0 else h + self.seldom(h))


class Run:
    """A training run: what it trains, and what it has come to."""

    def __init__(self, device: torch.device, name: str, **how: Any) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = Model().to(device)
        self.average = copy.deepcopy(self.model)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        matrices, others = [p for p in trained if p.ndim == 2], [p for p in trained if p.ndim != 2]
        # Muon takes matrices alone.
        groups = [{"params": matrices}, *([] if name == "Muon" else [{"params": others, "lr": 5e-3}])]
        self.optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(groups, **{**HYPER[name], **how})
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.losses: list[Tensor] = []

    def steps(self, numbers: range) -> None:
        for i in numbers:
            for part in range(4):  # of one batch
                loss = self.model(batch(self.device, 4 * i + part, rows=8), i).square().mean()
                (loss / 4).backward()
                self.losses.append(loss.detach())
            self.losses.append(nn.utils.clip_grad_norm_(self.model.parameters(), 0.5))
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad(set_to_none=i % 2 == 0)
            with torch.no_grad():
                for mean, now in zip(self.average.parameters(), self.model.parameters(), strict=True):
                    mean.lerp_(now, 0.1)

    def save(self) -> bytes:
        buffer = io.BytesIO()
        torch.save([part.state_dict() for part in (self.model, self.average, self.optimizer, self.schedule)], buffer)
        return buffer.getvalue()

    def load(self, saved: bytes) -> None:
        parts = torch.load(io.BytesIO(saved), map_location=self.device)
        for part, state in zip((self.model, self.average, self.optimizer, self.schedule), parts, strict=True):
            part.load_state_dict(state)

    def result(self) -> list[bytes]:
        state = [value for of in self.optimizer.state.values() for value in of.values() if isinstance(value, Tensor)]
        return bits([*self.losses, *self.model.parameters(), *self.average.parameters(), *state])


@contextmanager
def _with_tiers(keeps_state: bool = True) -> Iterator[None]:
    with streamed(), state_streamed(), tiers.session(allocator="torch", policy="keep", dram="64MiB") as session:
        yield
        moved = session.stats()["moved"]
        assert moved.get("weights", 0) > 0, "nothing was streamed, so nothing was tested"
        read, written = moved.get("state_read", 0), moved.get("state_write", 0)
        assert read == written, "what was copied to hbm was not all copied back"
        assert (read > 0) == keeps_state, "state was streamed, or not, against what the optimizer keeps"


def _run(
    device: torch.device, around: Callable[[], AbstractContextManager[None]], name: str, **how: Any
) -> list[bytes]:
    with around():
        run = Run(device, name, **how)
        run.steps(range(STEPS))
        return run.result()


def are_as_without_tiers(device: torch.device) -> None:
    """With clipping, a schedule, two groups, frozen parameters, missing gradients, accumulation and an average."""
    with deterministic_kernels():
        for name in (name for name in HYPER if hasattr(torch.optim, name)):
            is_fused = name in FUSED and (device.type == "cpu" or name != "Adagrad")  # which has no such kernel on GPUs
            ways = [{}, *([] if name == "Muon" else [{"foreach": True}]), *([FUSED[name]] if is_fused else [])]
            # On the host all ways of an optimizer are one kernel each for a parameter, so one optimizer tells.
            for how in ways if device.type == "cuda" or name == "AdamW" else ways[:1]:
                around = partial(_with_tiers, keeps_state=how.get("momentum", 1) > 0)
                assert _run(device, around, name, **how) == _run(device, nullcontext, name, **how), (name, how)
                print(f"  {name} {how}")


def are_saved_and_resumed_with_and_without_tiers_in_each_half(device: torch.device) -> None:
    def half(around: Callable[[], AbstractContextManager[None]], saved: bytes | None) -> tuple[bytes, list[bytes]]:
        with around():
            run = Run(device, "AdamW")
            if saved is not None:
                run.load(saved)
            run.steps(range(10) if saved is None else range(10, STEPS))
            return run.save(), run.result()

    with deterministic_kernels():
        plain = half(nullcontext, half(nullcontext, None)[0])[1]
        for first in (nullcontext, _with_tiers):
            for second in (nullcontext, _with_tiers):
                assert half(second, half(first, None)[0])[1] == plain, (first, second)


def skip_the_steps_that_a_scaler_refuses(device: torch.device) -> None:
    def program(around: Callable[[], AbstractContextManager[None]]) -> list[bytes]:
        with ExitStack() as stack:
            stack.enter_context(around())
            run, scaler = Run(device, "AdamW"), torch.amp.GradScaler(device.type, init_scale=2.0**10)
            for i in range(8):
                with torch.autocast(device.type, torch.bfloat16):
                    loss = run.model(batch(device, i, rows=8), i).float().square().mean()
                scaler.scale(loss * (float("inf") if i in (2, 5) else 1)).backward()
                scaler.unscale_(run.optimizer)
                nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
                scaler.step(run.optimizer)
                scaler.update()
                run.optimizer.zero_grad()
                run.losses += [loss.detach(), torch.tensor(scaler.get_scale())]
            return run.result()

    with deterministic_kernels():
        assert program(_with_tiers) == program(nullcontext)


def step_as_ever_in_a_forked_child(device: torch.device) -> None:
    """Whose lanes are the parent's: nobody would carry its copies out."""
    if device.type == "cuda":  # which does not outlast a fork
        return
    with _with_tiers():
        run = Run(device, "AdamW")
        run.steps(range(2))
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)  # OpenMP's threads did not come along
            run.steps(range(2, 3))
            os._exit(7)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        run.steps(range(2, 4))


def may_be_looked_at_while_they_step(device: torch.device) -> None:
    """As by a signal's handler that saves them."""
    seen: list[Any] = []
    with _with_tiers():
        run = Run(device, "AdamW")
        run.steps(range(2))
        whole = run.optimizer.state_dict()["param_groups"]
        plain = torch.optim.AdamW._init_group

        def look(self: torch.optim.AdamW, *arguments: Any) -> Any:
            seen.append(run.optimizer.state_dict())
            return plain(self, *arguments)

        with mock.patch.object(torch.optim.AdamW, "_init_group", look):
            run.optimizer.step()
    assert len(seen) > 2, "nothing was made in parts"
    for each in seen:
        assert [group["params"] for group in each["param_groups"]] == [group["params"] for group in whole]


if __name__ == "__main__":
    main("optimizers")
