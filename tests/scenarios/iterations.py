"""Steps that are not one forward and one backward of one model: accumulation, shapes that change, two optimizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.scenarios import assert_same, batch, blocks, gradients, main, moving, perceptron, train


def losses_of_several_steps_that_go_backward_together(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)
        results = []
        for _ in range(3):
            losses = [model(batch(device, i)).square().mean() for i in range(3)]
            sum(losses).backward()
            results += gradients(model)
            losses = [model(batch(device, i)).square().mean() for i in range(3)]
            for loss in losses:  # first in, first out: the wrong way round
                loss.backward()
            results += gradients(model)
        return results

    assert_same(program, device)


def gradient_accumulation_with_lengths_that_change(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        results = []
        for step in range(5):
            optimizer.zero_grad()
            for i in range(3):
                loss = model(batch(device, 3 * step + i, rows=300 * (1 + (step + i) % 4))).square().mean()
                loss.backward()
                results.append(loss.detach())
            optimizer.step()
            results += gradients(model)
        return results

    assert_same(program, device)


def shapes_that_change_from_step_to_step(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        results = []
        for i, rows in enumerate((1024, 1024, 1, 5000, 17, 1024, 3000, 1024)):
            optimizer.zero_grad()
            h = model(batch(device, i, rows=rows))
            loss = (h * torch.tanh(h) if i % 3 else h).square().mean()
            loss.backward()
            optimizer.step()
            results += [loss.detach(), *gradients(model)]
        return results

    for policy in ("move", "auto"):
        assert_same(program, device, policy=policy)


def layers_skipped_at_random(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device, depth=6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        choose = torch.Generator().manual_seed(0)
        results = []
        for i in range(10):
            optimizer.zero_grad()
            h = batch(device, i)
            for layer in model:
                if torch.rand((), generator=choose) < 0.7:
                    h = layer(h)
            loss = (h * h).mean()
            if loss.requires_grad:
                loss.backward()
                optimizer.step()
            results += [loss.detach(), *gradients(model)]
        return results

    assert_same(program, device)


def a_gan_with_two_optimizers(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        generator, critic = perceptron(device, seed=1), perceptron(device, seed=2)
        makes = torch.optim.Adam(generator.parameters(), lr=1e-4)
        judges = torch.optim.Adam(critic.parameters(), lr=1e-4)
        results = []
        for i in range(4):
            fake = generator(batch(device, 2 * i))
            judges.zero_grad()
            (critic(fake.detach()).mean() - critic(batch(device, 2 * i + 1)).mean()).backward()
            judges.step()
            makes.zero_grad()
            loss = -critic(fake).mean()
            loss.backward()
            makes.step()
            results += [loss.detach(), *gradients(generator), *gradients(critic)]
        return results

    assert_same(program, device)


def optimizers_that_step_within_backward(device: torch.device) -> None:
    """Each parameter has an optimizer of its own, which steps as soon as its gradient is there."""

    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)
        optimizers = {p: torch.optim.Adam([p], lr=1e-3) for p in model.parameters()}

        def step(parameter: Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        results = []
        for i in range(6):
            loss = model(batch(device, i)).square().mean()
            loss.backward()
            results += [loss.detach(), *(p.detach().clone() for p in model.parameters())]
        return results

    # The last one is over when the next forward begins, which does not come.
    assert assert_same(program, device)["iterations"] == 5


def losses_dropped_without_backward(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = perceptron(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        results = []
        for i in range(8):
            optimizer.zero_grad()
            loss = model(batch(device, i)).square().mean()
            results.append(loss.detach())
            if i % 3 == 1:
                del loss
                continue
            loss.backward()
            optimizer.step()
        return results

    assert_same(program, device)


def nothing_of_a_dropped_graph_stays_in_a_tier(device: torch.device) -> None:
    with moving(room=0) as session:
        model = perceptron(device)
        train(model, device)
        for i in range(50):
            model(batch(device, i)).square().mean()
        train(model, device, steps=1)
        peak = session.stats()["peak"]["dram"]
        print(f"  peak dram {peak}")
        assert peak <= 24 << 20  # four iterations' worth: every forward saves 4 MiB, in blocks of 2


class _Operations(TorchDispatchMode):
    """Counts the operations that are carried out, but for those that make other tensors on memory that is there."""

    OURS = ("aten.detach.default", "aten.set_.source_Storage_storage_offset", "aten.empty.memory_format")

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if str(func) not in self.OURS:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def keep_computes_nothing_while_it_records(device: torch.device) -> None:
    """A program that barely fits has no room for trials, and our allocator lays out what it asks for in every step."""
    model = blocks(device, nn.LayerNorm(256), nn.GELU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> Counter[str]:
        with _Operations() as operations:
            model(batch(device, 0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return operations.counts

    step()
    plain = step()
    with moving(policy="keep"):
        assert [step() == plain for _ in range(6)] == [True] * 6


def keep_leaves_what_is_saved_to_pytorch_once_it_has_recorded(device: torch.device) -> None:
    """With five microseconds a tensor, a program of small kernels was a tenth slower for nothing."""
    model = blocks(device, nn.LayerNorm(256), nn.GELU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    top = torch._C._autograd._top_saved_tensors_default_hooks

    def step(rows: int = 2048) -> None:
        for _ in range(2):  # micro-batches
            model(batch(device, 0, rows=rows)).square().mean().backward()
        with torch.no_grad():
            model(batch(device, 0, rows=rows))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with moving(policy="keep") as session:
        for _ in range(8):
            step()
        assert top(True) is None
        before = session.stats()
        assert before["iterations"] >= before["steps"] == 8
        for rows in (2048, 512, 4096, 1):  # also what nobody has foreseen
            step(rows)
        after = session.stats()
        assert (after["iterations"], after["steps"]) == (before["iterations"] + 4, 12)
        grad = torch.func.grad(lambda x: x.square().mean())(batch(device, 0))
        assert grad.isfinite().all()
    with moving() as session:  # the next session begins afresh
        step()
        assert top(True) is not None
        assert session.stats()["moved"]["d2h"] > 0
    assert top(True) is None


def a_program_of_which_nothing_is_large_enough_to_move_is_not_recorded_for_ever(device: torch.device) -> None:
    """No tensor that moves tells that backward begins: the first iteration never ended, and its record grew."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with moving(policy="auto") as session:
        for i in range(12):
            optimizer.zero_grad()
            model(batch(device, i, rows=4, width=8)).square().mean().backward()
            optimizer.step()
        saver = session.runtime.saver()
        assert session.stats()["iterations"] >= 11
        assert saver is not None and not saver.place.recording


if __name__ == "__main__":
    main("iterations")
