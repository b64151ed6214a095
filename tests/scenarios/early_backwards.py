"""Backwards that are called on the way: of a loss in chunks, of auxiliary losses. They end no iteration.

Where each ended one, no plan knew when backward asks for what the forward had saved, and it waited for all that moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from unittest import mock

import torch
from torch import Tensor, nn

from tests.programs import deterministic_kernels
from tests.scenarios import batch, bits, main, moving, perceptron
from torch_tiers.migrator.controller import plan_requests
from torch_tiers.migrator.saved import movers
from torch_tiers.migrator.saved.packed import Packed
from torch_tiers.migrator.saved.saver import Saver
from torch_tiers.migrator.streams.host import HostCompute

STEPS, CHUNKS = 8, 4
Trains = Callable[[torch.device], Iterator[Tensor]]


class _Model(nn.Module):
    """A body, and a head that losses call by itself."""

    def __init__(self, device: torch.device, heads: int = 1) -> None:
        super().__init__()
        self.body = perceptron(device, depth=6)
        self.heads = nn.ModuleList(perceptron(device, depth=1, seed=1 + k) for k in range(heads))
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out

    def stepped(self, loss: Tensor) -> Tensor:
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def _in_parts(outputs: Tensor, head: nn.Module, chunks: int = CHUNKS) -> Tensor:
    """Go backward from each chunk's loss to the outputs, and from there to the model."""
    leaf = outputs.detach().requires_grad_()
    sum_of_losses = torch.zeros((), device=outputs.device)
    for chunk in leaf.chunk(chunks):
        loss = head(chunk).square().mean() / chunks
        loss.backward()
        sum_of_losses += loss.detach()
    outputs.backward(leaf.grad)
    return sum_of_losses


def _whole(device: torch.device) -> Iterator[Tensor]:
    model = _Model(device)
    for i in range(STEPS):
        loss = model.heads[0](model(batch(device, i))).square().mean()
        loss.backward()
        yield model.stepped(loss)


def _chunked(device: torch.device, chunks: int = CHUNKS) -> Iterator[Tensor]:
    model = _Model(device)
    for i in range(STEPS):
        yield model.stepped(_in_parts(model(batch(device, i)), model.heads[0], chunks))


def _in_many_chunks(device: torch.device) -> Iterator[Tensor]:
    """All that is saved for them is many times what the forward saves."""
    return _chunked(device, 32)


def _chunked_micro_batches(device: torch.device) -> Iterator[Tensor]:
    model = _Model(device)
    for i in range(STEPS):
        yield model.stepped(sum(_in_parts(model(batch(device, 2 * i + k)), model.heads[0]) for k in range(2)))


def _heads_on_what_is_detached(device: torch.device) -> Iterator[Tensor]:
    model = _Model(device, heads=3)
    for i in range(STEPS):
        outputs = model(batch(device, i))
        leaf = outputs.detach().requires_grad_()
        losses = []
        for head in model.heads:
            losses.append(head(leaf).square().mean())
            losses[-1].backward()
        outputs.backward(leaf.grad)
        yield model.stepped(sum(losses))


def _losses_of_layers(device: torch.device, *, alone: bool) -> Iterator[Tensor]:
    """Each trains a head on a layer's output: and the layer `alone`, or the last one all layers."""
    model = _Model(device, heads=2)
    layers = [model.body[:6], model.body[6:]]
    for i in range(STEPS):
        hidden, losses = batch(device, i), []
        for layer, head in zip(layers, model.heads, strict=True):
            hidden = layer(hidden.detach() if alone else hidden)
            losses.append(head(hidden if alone or layer is layers[-1] else hidden.detach()).square().mean())
            losses[-1].backward()
        yield model.stepped(sum(losses))


def _auxiliary_losses(device: torch.device) -> Iterator[Tensor]:
    return _losses_of_layers(device, alone=False)


def _layers_that_learn_by_themselves(device: torch.device) -> Iterator[Tensor]:
    return _losses_of_layers(device, alone=True)


def _heads_on_a_graph_that_is_retained(device: torch.device) -> Iterator[Tensor]:
    model = _Model(device, heads=3)
    for i in range(STEPS):
        outputs, losses = model(batch(device, i)), []
        for head in model.heads:
            losses.append(head(outputs).square().mean())
            losses[-1].backward(retain_graph=head is not model.heads[-1])
        yield model.stepped(sum(losses))


def _micro_batches(device: torch.device, ahead: int = 0) -> Iterator[Tensor]:
    """Forwards of so many are made ahead of each backward, as in a stage of a pipeline."""
    model = _Model(device)
    for i in range(STEPS):
        waiting, losses = [], []
        for k in range(6):
            waiting.append(model.heads[0](model(batch(device, 6 * i + k))).square().mean())
            if len(waiting) > ahead:
                losses.append(waiting.pop(0))
                losses[-1].backward()
        for loss in waiting:
            losses.append(loss)
            loss.backward()
        yield model.stepped(sum(losses))


def _a_pipeline(device: torch.device) -> Iterator[Tensor]:
    return _micro_batches(device, ahead=3)


def _micro_batches_with_a_branch_that_nobody_uses(device: torch.device) -> Iterator[Tensor]:
    """Its graph is held until the next forward is over."""
    model = _Model(device, heads=2)
    for i in range(STEPS):
        losses = []
        for k in range(3):
            x = batch(device, 3 * i + k)
            outputs = model.heads[0](x), model(x)
            losses.append(outputs[0].square().mean())
            losses[-1].backward()
        yield model.stepped(sum(losses))


def _a_gan(device: torch.device) -> Iterator[Tensor]:
    """Both step in the end, and as many layers generate as judge."""
    model, critic = _Model(device), perceptron(device, depth=7, seed=9)
    judges = torch.optim.Adam(critic.parameters(), lr=1e-4)
    for i in range(STEPS):
        judges.zero_grad()
        fake = model.heads[0](model(batch(device, 2 * i)))
        judged = critic(fake.detach()).mean() - critic(batch(device, 2 * i + 1)).mean()
        judged.backward()
        loss = -critic(fake).mean()
        loss.backward()
        judges.step()
        yield model.stepped(loss + judged)


def _run(program: Trains, device: torch.device) -> tuple[list[int], int]:
    """Check that a program has the losses that it has plainly; its iterations by step, and when it had a plan.

    Those of steps after which hooks are off are left out: on our pages nothing of these programs has to move, and once
    that is sure, optimizers alone tell of iterations.
    """
    with deterministic_kernels():
        plain = bits(list(program(device)))
        # Plans are made at once: how long that takes is no part of the question.
        with moving(policy="auto") as session, mock.patch.object(plan_requests, "AT_ONCE", 1 << 20):
            losses, ended, planned = [], [0], STEPS
            for step, loss in enumerate(program(device)):
                losses.append(loss)
                saver = session.runtime.saver()
                assert saver is not None
                if not saver.resting:
                    ended.append(session.stats()["iterations"])
                if any(mover.learner.plans for mover in saver.movers.armed):
                    planned = min(planned, step)
        assert bits(losses) == plain, program.__name__
    iterations = [after - before for before, after in pairwise(ended)]
    print(f"  {program.__name__}: iterations {iterations}, planned in step {planned}")
    return iterations, planned


def a_loss_in_chunks_has_one_iteration_a_step_and_a_plan_as_early_as_the_whole_loss(device: torch.device) -> None:
    _, whole = _run(_whole, device)
    for program in (_chunked, _in_many_chunks):
        iterations, planned = _run(program, device)
        assert set(iterations) == {1}
        assert planned == whole


def small_backwards_on_the_way_end_no_iteration(device: torch.device) -> None:
    for program in (_heads_on_what_is_detached, _auxiliary_losses):
        assert set(_run(program, device)[0]) == {1}


def each_micro_batch_is_an_iteration_also_with_a_loss_in_chunks(device: torch.device) -> None:
    assert set(_run(_micro_batches, device)[0]) == {6}
    assert set(_run(_chunked_micro_batches, device)[0]) == {2}
    assert set(_run(_micro_batches_with_a_branch_that_nobody_uses, device)[0]) == {3}


def a_forward_that_begins_anew_after_a_backward_ends_an_iteration(device: torch.device) -> None:
    """Though most of what was saved waits for its own backward."""
    assert set(_run(_a_pipeline, device)[0]) == {3}


def a_backward_that_uses_most_of_what_waits_ends_an_iteration(device: torch.device) -> None:
    assert set(_run(_layers_that_learn_by_themselves, device)[0]) == {2}
    assert set(_run(_heads_on_a_graph_that_is_retained, device)[0]) == {3}
    assert set(_run(_a_gan, device)[0]) == {2}


def what_a_loss_in_chunks_moves_is_planned_to_come_back(device: torch.device) -> None:
    with moving() as session:
        assert len(list(_chunked(device))) == STEPS
        saver = session.runtime.saver()
        assert saver is not None
        (mover,) = saver.movers.armed
        (plan,) = mover.learner.plans
        assert plan.groups and all(group.first_use is not None for group in plan.groups)
        (trace,) = mover.learner.traces
        assert len([site for site in trace.sites if site.birth > trace.turn]) >= CHUNKS - 1


def a_loss_in_chunks_has_one_iteration_a_step_also_where_no_hook_is_called(device: torch.device) -> None:
    def keeps(program: Trains) -> list[int]:
        with mock.patch.object(HostCompute, "counts", True), moving(policy="auto", room=1 << 30) as session:
            ended = [0, *(session.stats()["iterations"] for _ in program(device))]
            saver = session.runtime.saver()
            assert saver is not None
            assert saver.place.bypass, "all hooks are called"
        return [after - before for before, after in pairwise(ended)]

    assert keeps(_chunked) == [1] * STEPS
    assert keeps(_chunked_micro_batches) == [2] * STEPS


def python_is_called_for_one_saved_tensor_after_each_such_backward(device: torch.device) -> None:
    """All others are what the plan expects, which the hooks in C++ handle."""
    calls: list[Tensor] = []
    pack = Saver.pack

    def counted(self: Saver, tensor: Tensor) -> Packed:
        calls.append(tensor)
        return pack(self, tensor)

    with mock.patch.object(Saver, "pack", counted), moving():
        ended = [len(calls) for _ in _chunked(device)]
    assert ended[-1] - ended[-2] == CHUNKS - 1, ended


def a_graph_that_is_never_used_keeps_no_iteration_open(device: torch.device) -> None:
    """The program has no optimizer of PyTorch's, whose step ends all iterations."""
    held, model = perceptron(device, depth=8), perceptron(device, depth=2, seed=1)
    with mock.patch.object(movers, "GROWTH", 3), moving(policy="auto") as session:
        graph = held(batch(device, 0))
        for i in range(12):
            gradients = torch.autograd.grad(model(batch(device, i)).square().mean(), list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter -= 1e-3 * gradient
        assert graph.requires_grad
        assert session.stats()["iterations"] > 2


if __name__ == "__main__":
    main("early_backwards")
