"""Weights that lie in DRAM are streamed, and nothing that a program does to them makes its results differ."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torch_tiers as tiers
from tests.programs import PROGRAMS, run
from tests.scenarios import (
    assert_same_streamed,
    batch,
    blocks,
    bytes_streamed,
    gradients,
    main,
    perceptron,
    step,
    streamed,
    train,
)
from torch_tiers.migrator.weights.streamer import Streamer


def leaves_the_programs_of_the_tests_as_they_are(device: torch.device) -> None:
    for program in PROGRAMS:
        plain = run(program, 3, str(device))
        with streamed(), tiers.session(allocator="torch", dram="64MiB") as session:
            assert run(program, 3, str(device)) == plain, program
            print(f"  {program}: {bytes_streamed(session)} bytes streamed")


def trains_adapters_of_frozen_weights(device: torch.device) -> None:
    def program(device: torch.device) -> Sequence[Tensor]:
        model = blocks(device).requires_grad_(False)
        adapters = nn.Sequential(nn.Linear(128, 4), nn.Linear(4, 128)).to(device)
        whole = nn.Sequential(model, adapters, copy.deepcopy(model))
        return train(whole, device)

    assert_same_streamed(program, device)


def infers_with_and_without_inference_mode(device: torch.device) -> None:
    def program(device: torch.device) -> Sequence[Tensor]:
        model, results = blocks(device).eval(), []
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                results += [model(batch(device, i)).clone() for i in range(3)]
        return results

    assert_same_streamed(program, device)


def evaluates_between_steps_and_within_them(device: torch.device) -> None:
    def program(device: torch.device) -> Sequence[Tensor]:
        model = blocks(device)
        optimizer, results = torch.optim.AdamW(model.parameters()), []
        for i in range(5):
            with torch.no_grad():
                results.append(model(batch(device, 9)).mean())
            loss = model(batch(device, i)).square().mean()
            with torch.no_grad():
                results.append(model(batch(device, 8)).mean())
            loss.backward()
            with torch.no_grad():
                results.append(model(batch(device, 7)).mean())
            optimizer.step()
            optimizer.zero_grad()
        return results

    assert_same_streamed(program, device)


def sees_what_operators_write_to_weights(device: torch.device) -> None:
    """Within a forward, between forward and backward, and from one step to the next, by whatever name."""

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(128, 128), nn.Linear(128, 128)

        def forward(self, x: Tensor) -> Tensor:
            h = self.one(x)
            with torch.no_grad():
                self.one.weight.data.mul_(0.5)
                self.other.weight[:64].add_(0.25)
            return self.other(h) + self.one(x.detach()).detach()

    def program(device: torch.device) -> Sequence[Tensor]:
        torch.manual_seed(0)
        model = Changing().to(device)
        optimizer, results = torch.optim.SGD(model.parameters(), lr=0.1), []
        average = copy.deepcopy(model)
        for i in range(4):
            loss = model(batch(device, i)).square().mean()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(now, 0.1)
                results += [mean.clone() for mean in average.parameters()]
                results.append(average(batch(device, i)).mean())
            optimizer.zero_grad()
            results.append(loss.detach())
        return results

    assert_same_streamed(program, device)


def sees_what_no_operator_writes_between_steps(device: torch.device) -> None:
    """A kernel of somebody's own: here numpy, or a copy by the driver through an alias that no operator knows."""

    def write(weight: Tensor) -> None:
        alias = torch.empty(0, dtype=weight.dtype, device=weight.device).set_(weight.untyped_storage())
        if weight.is_cpu:
            alias.numpy()[:] *= 0.5
        else:
            alias.untyped_storage().copy_((alias * 0.5).untyped_storage())

    def program(device: torch.device) -> Sequence[Tensor]:
        model, results = perceptron(device), []
        for i in range(4):
            loss = model(batch(device, i)).square().mean()
            loss.backward()
            results += [loss.detach(), *gradients(model)]
            for layer in model:
                if isinstance(layer, nn.Linear):
                    write(layer.weight.detach())
            results.append(sum(p.detach().sum() for p in model.parameters()))
            model.zero_grad()
        return results

    assert_same_streamed(program, device)


def has_several_models_and_optimizers(device: torch.device) -> None:
    def program(device: torch.device) -> Sequence[Tensor]:
        maker, judge, results = perceptron(device, seed=1), perceptron(device, seed=2), []
        optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in (maker, judge)]
        for i in range(4):
            made = maker(batch(device, i))
            loss = judge(made.detach()).square().mean() - judge(batch(device, 100 + i)).mean()
            loss.backward()
            optimizers[1].step()
            judge.zero_grad()
            judge(made).square().mean().backward()
            optimizers[0].step()
            results += [loss.detach(), *gradients(maker), *gradients(judge)]
            maker.zero_grad()
            judge.zero_grad()
        return results

    assert_same_streamed(program, device)


def recomputes_in_backward(device: torch.device) -> None:
    def program(device: torch.device, *, reentrant: bool) -> Sequence[Tensor]:
        layers = [layer for layer in blocks(device)]
        model = nn.ModuleList(layers)

        def loss_of(_: nn.Module, x: Tensor) -> Tensor:
            x.requires_grad_()
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x.square().mean()

        return train(model, device, loss_of=loss_of)

    for reentrant in (False, True):
        assert_same_streamed(lambda device, reentrant=reentrant: program(device, reentrant=reentrant), device)


def differentiates_twice_and_again(device: torch.device) -> None:
    def program(device: torch.device) -> Sequence[Tensor]:
        model, results = perceptron(device), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(4):
            x = batch(device, i).requires_grad_()
            out = model(x).sum()
            (first,) = torch.autograd.grad(out, x, create_graph=True)
            loss = (first.norm() - 1).square() + out * 1e-3
            loss.backward(retain_graph=True)
            loss.backward()
            results += [loss.detach(), *gradients(model)]
            optimizer.step()
            optimizer.zero_grad()
        return results

    assert_same_streamed(program, device)


def steps_within_backward(device: torch.device) -> None:
    def program(device: torch.device) -> Sequence[Tensor]:
        model, results = perceptron(device), []
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def step(parameter: Tensor) -> None:
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for i in range(4):
            loss = model(batch(device, i)).square().mean()
            loss.backward()
            results += [loss.detach(), *(p.detach().clone() for p in model.parameters())]
        return results

    assert_same_streamed(program, device)


def uses_weights_outside_of_their_modules(device: torch.device) -> None:
    def program(device: torch.device) -> Sequence[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 32), nn.Linear(32, 50, bias=False)).to(device)
        model[2].weight = model[0].weight
        optimizer, results = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        tokens = torch.arange(50, device=device)
        for _ in range(4):
            loss = F.cross_entropy(model(tokens), tokens.flip(0))
            loss = loss + 0.1 * (model[1].weight @ model[1].weight.t()).square().mean()
            loss = loss + torch.cat([p.flatten() for p in model.parameters()]).square().sum() * 1e-3
            loss.backward()
            results += [loss.detach(), *gradients(model)]
            optimizer.step()
            optimizer.zero_grad()
            results.append(torch.linalg.matrix_norm(model[1].weight.detach()))
        return results

    assert_same_streamed(program, device)


def goes_on_after_an_exception(device: torch.device) -> None:
    class Fails(nn.Module):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise ValueError("a batch that is no good")
            return x

    def program(device: torch.device) -> Sequence[Tensor]:
        fails = Fails()
        model, results = nn.Sequential(*perceptron(device), fails, nn.Linear(128, 128, device=device)), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(6):
            fails.fails = i in (2, 4)
            try:
                if i == 4:
                    with torch.no_grad():
                        model(batch(device, i))
                results += step(model, device, i, optimizer)
            except ValueError:
                with torch.no_grad():
                    model[0].weight.mul_(1.5)
        return results

    assert_same_streamed(program, device)


def infers_in_several_threads(device: torch.device) -> None:
    def program(device: torch.device) -> Sequence[Tensor]:
        model = blocks(device).eval()
        results: dict[int, Tensor] = {}

        def infer(number: int) -> None:
            with torch.no_grad():
                for i in range(8):
                    results[8 * number + i] = model(batch(device, i)).clone()

        threads = [threading.Thread(target=infer, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[key] for key in sorted(results)]

    assert_same_streamed(program, device)


def is_functional(device: torch.device) -> None:
    def program(device: torch.device) -> Sequence[Tensor]:
        model = perceptron(device, depth=2)
        values = {name: value.detach() for name, value in model.named_parameters()}

        def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
            return torch.func.functional_call(model, values, (x,)).square().mean()

        x = batch(device, 0, rows=16)
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, x.unsqueeze(1))
        return [*train(model, device, steps=2), *each.values(), *torch.func.grad(loss)(values, x).values()]

    assert_same_streamed(program, device)


def compiles_its_model(device: torch.device) -> None:
    """Compiled code calls products with a tensor for what they return."""
    for backend in ("aot_eager", "inductor"):

        def program(device: torch.device, backend: str = backend) -> Sequence[Tensor]:
            torch.compiler.reset()
            model = perceptron(device, depth=4)
            model[0].requires_grad_(False)
            results = train(torch.compile(model, backend=backend), device)
            with torch.inference_mode():
                return [*results, model(batch(device, 9)).clone()]

        assert_same_streamed(program, device)


def expects_weights_where_no_optimizer_of_pytorch_steps(device: torch.device) -> None:
    """A program that infers with gradients on, and one that has an optimizer of its own."""
    for trains in (False, True):
        model, kinds = perceptron(device, depth=6), []
        begin = Streamer.begin

        def note(self: Streamer, kind: Hashable, begin: Any = begin, kinds: list[Hashable] = kinds) -> None:
            kinds.append(kind)
            begin(self, kind)

        with (
            mock.patch.object(Streamer, "begin", note),
            streamed(),
            tiers.session(allocator="torch", dram="64MiB"),
        ):
            for i in range(6):
                loss = model(batch(device, i)).square().mean()
                if trains:
                    loss.backward()
                    with torch.no_grad():
                        for p in model.parameters():
                            p -= 0.1 * p.grad
                            p.grad = None
        assert len(kinds) == 6 and kinds[-1] == kinds[-2], "a pass that is like the one before"


def is_streamed_after_a_gradient_within_forward(device: torch.device) -> None:
    """As for a penalty on gradients."""
    model = perceptron(device, depth=6)
    with streamed(), tiers.session(allocator="torch", dram="64MiB") as session:

        class Penalised(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, x: Tensor) -> Tensor:
                x = x.requires_grad_()
                (grad,) = torch.autograd.grad(self.model(x).sum(), x)
                self.before = bytes_streamed(session)
                return self.model(grad)

        penalised = Penalised()
        penalised(batch(device, 0))
        assert bytes_streamed(session) > penalised.before


def copies_once_where_each_layer_is_called_by_itself(device: torch.device) -> None:
    """Copies live as long as one call of an outermost module, so none is made for the next one. Some read nothing."""
    model = perceptron(device, depth=12)
    weights = sum(p.nbytes for p in model.parameters())
    with streamed(), tiers.session(allocator="torch", dram="64MiB") as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(5):
            before, x = bytes_streamed(session), batch(device, i)
            for layer in model:
                x = layer(x)
            x.square().mean().backward()
            optimizer.step()
            assert bytes_streamed(session) - before <= 2 * weights


def copies_little_in_vain_where_another_expert_is_read_each_time(device: torch.device) -> None:
    """What was expected, and gave way to what is read, does not come again before the pass is as expected."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(perceptron(device, depth=8, seed=i) for i in range(8))
            self.turn = 0

        def forward(self, x: Tensor) -> Tensor:
            self.turn += 1
            for i, experts in enumerate(self.layers):
                x = experts[2 * ((self.turn + i) % 8)](x)
            return x

    model = Experts()
    weights = 8 * sum(p.nbytes for p in model.layers[0][0].parameters())
    with streamed(), tiers.session(allocator="torch", dram="64MiB") as session, torch.no_grad():
        for i in range(8):
            before = bytes_streamed(session)
            model(batch(device, i))
            assert bytes_streamed(session) - before <= 1.5 * weights


def is_asked_for_no_more_than_is_read(device: torch.device) -> None:
    """Once the order is known, each weight comes once for forward, and once for backward unless it is there still."""
    model = perceptron(device, depth=8)
    weights = sum(p.nbytes for p in model.parameters())
    step: Callable[[int], object] = lambda i: model(batch(device, i)).square().mean().backward()  # noqa: E731
    with streamed(), tiers.session(allocator="torch", dram="64MiB") as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(6):
            before = bytes_streamed(session)
            step(i)
            optimizer.step()
        assert bytes_streamed(session) - before <= 2 * weights


if __name__ == "__main__":
    main("streaming")
