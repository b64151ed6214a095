"""Modules that are recomputed as a whole, from outside: nothing is counted, drawn or called twice."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

from tests.scenarios import WHOLE, Block, Program, assert_same, batch, blocks, main, moved, moving, recomputed, train
from torch_tiers.migrator.recompute import regions


def gives_the_same_gradients_and_random_numbers(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        return [*train(blocks(device), device), torch.rand(4, device=device)]

    assert_same(program, device, moves=False, **WHOLE)
    assert_same(program, device, regions=True)


def recomputes_and_moves_the_inputs(device: torch.device) -> None:
    model = blocks(device)
    with moving(regions=True) as session:
        train(model, device)
        assert recomputed(session) == {f"Sequential.{k}.layers" for k in range(3)}
        before = moved(session)["d2h"]
        loss = model(batch(device, 9)).sum()
        print(f"  {moved(session)['d2h'] - before} bytes out")
        loss.backward()
        saver = session.runtime.saver()
        assert saver is not None and not saver.place.recording, "its sites are those of the plan"
        keys = {key for mover in saver.armed_movers for plan in mover.learner.plans for key in plan.keep}
        groups = [group for mover in saver.armed_movers for plan in mover.learner.plans for group in plan.groups]
        assert {"Sequential.1.layers/in:0"} <= keys | {key for group in groups for key in group.sites}


class _Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.empty(0)


def foresees_the_inputs_where_the_checkpoint_saves_an_empty_tensor_first(device: torch.device) -> None:
    def older(*args: Any, **kwargs: Any) -> Any:
        _Saves.apply(torch.empty(0, requires_grad=True))
        return plain(*args, **kwargs)

    plain = regions.checkpoint
    with (
        mock.patch.object(regions, "checkpoint", older),
        moving(regions=True) as session,
    ):
        model = blocks(device)
        train(model, device)
        assert recomputed(session)
        loss = model(batch(device, 9)).sum()
        saver = session.runtime.saver()
        assert saver is not None and not saver.place.recording
        unforeseen = [mover.filling.unforeseen for mover in saver.armed_movers]
        assert not any(unforeseen), "something was saved that no plan knows"
        loss.backward()


def moves_what_it_would_have_recomputed_while_it_records_anew(device: torch.device) -> None:
    model = blocks(device)
    with moving(**WHOLE) as session:
        train(model, device)
        saver = session.runtime.saver()
        assert saver is not None and recomputed(session)
        before = moved(session)["d2h"]
        model(batch(device, 9)).sum().backward()
        assert moved(session)["d2h"] == before
        model(batch(device, 9)).tanh().square().sum().backward()  # saves what no plan knows
        for _ in range(2):
            before = moved(session)["d2h"]
            loss = model(batch(device, 9)).sum()
            if saver.place.recording:
                break
            loss.backward()
        assert saver.place.recording, "what is new is recorded"
        inner = sum(block.layers(batch(device, 9)).nbytes for block in model)
        assert moved(session)["d2h"] - before > inner, "no plan has room for what the regions save"
        loss.backward()


def counts_running_statistics_once(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = blocks(device, nn.BatchNorm1d(256))
        return [*train(model, device), *(buffer.clone() for buffer in model.buffers())]

    assert_same(program, device, moves=False, **WHOLE)


def calls_hooks_once(device: torch.device) -> None:
    calls = []
    model = blocks(device)
    model[1].layers.register_forward_hook(lambda *_: calls.append("forward"))
    with moving(**WHOLE) as session:
        train(model, device, steps=6)
        assert recomputed(session)
    assert len(calls) == 6


class _Given(nn.Module):
    """Adds what a hook hands in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x: Tensor, *, given: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) + given)


def what_a_hook_hands_in_may_change_before_backward(device: torch.device) -> None:
    """So a forward that is given it cannot be repeated, though the module was called without."""

    def program(device: torch.device) -> list[Tensor]:
        model, given = nn.Sequential(*(Block() for _ in range(3))), torch.zeros(2048, 128)
        for block in model:
            block.layers = _Given()
            block.layers.register_forward_pre_hook(lambda _, args, named: (args, {"given": given}), with_kwargs=True)

        def loss_of(model: nn.Module, x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            given.add_(0.01)
            return loss

        torch.manual_seed(0)
        given = given.to(device)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.05)
        return train(model.to(device), device, loss_of=loss_of)

    assert_same(program, device, moves=False, **WHOLE)
    with moving(**WHOLE) as session:
        program(device)
        assert not recomputed(session)


def what_a_hook_saves_is_not_recomputed_with_its_module(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = blocks(device)
        for block in model:
            block.layers.register_forward_hook(lambda _, args, output: output * torch.sigmoid(output))
        return train(model, device)

    assert_same(program, device, moves=False, **WHOLE)
    with moving(regions=True) as session:
        program(device)
        assert not recomputed(session)
        saver = session.runtime.saver()
        assert saver is not None and not saver.place.recording, "its sites are those of the plan"


def leaves_modules_as_they_were(device: torch.device) -> None:
    model = blocks(device)
    with moving(**WHOLE):
        train(model, device)
        assert "forward" in vars(model[1].layers)
        saved = io.BytesIO()
        torch.save(model[1].layers, saved)
        saved.seek(0)
        for twin in (copy.deepcopy(model[1].layers), torch.load(saved, weights_only=False)):
            with torch.no_grad():
                twin[0].weight.zero_()
                twin[0].bias.zero_()
            twin.eval()
            x = batch(device, 0)
            assert torch.equal(twin(x), twin[2].bias.expand_as(x)), "it is its own module's forward"
    assert not any("forward" in vars(module) for module in model.modules())


def leaves_modules_alone_that_change_their_own_state(device: torch.device) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return x

    def program(device: torch.device) -> list[Tensor]:
        model = blocks(device, Counter())
        return [*train(model, device), *(buffer.clone() for buffer in model.buffers())]

    assert_same(program, device, moves=False, **WHOLE)
    with moving(**WHOLE) as session:
        train(blocks(device, Counter()), device)
        assert not recomputed(session)


class _Meter:
    def __init__(self) -> None:
        self.values: list[float] = []


_METER = _Meter()


class _Shares(Block):
    """Keeps what it makes where no attribute of its own leads to."""

    shared: ClassVar[list[Tensor]] = []

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.hidden = [nn.BatchNorm1d(128)]

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = super().forward(x, scale)
        if self.where == "global":
            _METER.values.append(x.detach().square().mean().item())
        elif self.where == "class":
            self.shared.append(x.square().mean())
        else:
            x = self.hidden[0].to(x.device)(x)
        return x


def leaves_modules_alone_that_change_what_others_share(device: torch.device) -> None:
    """A list within a global object, one of the class, a module in a plain list: meters, auxiliary losses, buffers."""

    def program(where: str) -> Program:
        def run(device: torch.device) -> list[Tensor]:
            _METER.values.clear()
            torch.manual_seed(0)
            model = nn.Sequential(*(_Shares(where) for _ in range(3))).to(device)

            def loss(model: nn.Module, x: Tensor) -> Tensor:
                result = model(x).square().mean() + sum(_Shares.shared)
                _Shares.shared.clear()
                return result

            results = train(model, device, steps=6, loss_of=loss)
            counted = [block.hidden[0].num_batches_tracked for block in model]  # type: ignore[index,union-attr]
            return [*results, torch.tensor(_METER.values), *counted]

        return run

    for where in ("global", "class", "hidden"):
        assert_same(program(where), device, moves=False, **WHOLE)


class _Precise(Block):
    """On a GPU its products differ with the precision; here what it makes of them does."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(x, scale) * (1.0 if torch.get_float32_matmul_precision() == "high" else 2.0)


def recomputes_at_the_precision_of_the_forward(device: torch.device) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        torch.set_float32_matmul_precision("high")
        try:
            return model(x).square().mean()
        finally:
            torch.set_float32_matmul_precision("highest")

    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(_Precise() for _ in range(3))).to(device)
        return train(model, device, steps=6, loss_of=loss)

    assert_same(program, device, moves=False, **WHOLE)


def calls_hooks_of_modules_within_once(device: torch.device) -> None:
    for late in (False, True):
        calls = []
        model = blocks(device)
        with moving(**WHOLE) as session:
            train(model, device, steps=6 * late)
            assert not late or recomputed(session)
            model[1].layers[1].register_forward_hook(lambda *_, calls=calls: calls.append("forward"))
            train(model, device, steps=12)
            assert recomputed(session) == {"Sequential.0.layers", "Sequential.2.layers"}
        assert len(calls) == 12


def calls_hooks_of_all_modules_once(device: torch.device) -> None:
    calls = []
    model = blocks(device)
    with moving(**WHOLE) as session:
        train(model, device, steps=6)
        assert recomputed(session)
        with register_module_forward_hook(lambda module, *_: calls.append(module)):
            train(model, device, steps=6)
    assert len(calls) == 6 * len(list(model.modules()))


def leaves_a_forward_alone_that_the_program_puts_over_it(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = blocks(device)
        results = train(model, device)
        for block in model:
            block.layers.forward = lambda x, inner=block.layers.forward: 2 * inner(x)
        results += train(model, device, steps=6, loss_of=lambda model, x: model(x).tanh().sin().mean())  # another plan
        for block in model:
            del block.layers.forward
        return results + train(model, device)

    assert_same(program, device, moves=False, **WHOLE)


def lets_modules_be_scripted_and_traced(device: torch.device) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(128, 256), nn.Linear(256, 128)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.second(F.gelu(self.first(x)))

    model = nn.Sequential(Block(), Block(), Block()).to(device)
    x = batch(device, 9)
    with moving(**WHOLE) as session:
        train(model, device)
        assert recomputed(session)
        for other in (torch.jit.script(model), torch.jit.trace(model, x), torch.fx.symbolic_trace(model)):
            assert torch.equal(other(x), model(x))


def holds_for_arguments_by_name_and_for_evaluation_in_between(device: torch.device) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.scale = nn.Parameter(torch.ones(128))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, scale=self.scale.exp())
            return x

    def program(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        model = Model().to(device)
        results = train(model, device)
        with torch.no_grad():
            results.append(model(batch(device, 9)))
        return results + train(model, device)

    assert_same(program, device, moves=False, **WHOLE)


def holds_after_an_exception_in_a_region(device: torch.device) -> None:
    class Fails(nn.Module):
        on = False

        def forward(self, x: Tensor) -> Tensor:
            if self.on:
                raise ArithmeticError
            return x

    def program(device: torch.device) -> list[Tensor]:
        model = blocks(device, Fails())
        results = train(model, device)
        model[1].layers[1].on = True
        for _ in range(2):
            try:
                model(batch(device, 0))
            except ArithmeticError:
                results.append(torch.rand(2))
        model[1].layers[1].on = False
        return results + train(model, device)

    assert_same(program, device, moves=False, **WHOLE)


def frees_a_model_with_its_last_reference(device: torch.device) -> None:
    with moving(**WHOLE) as session:
        model = blocks(device)
        train(model, device)
        assert recomputed(session)
        layers = weakref.ref(model[1].layers)
        gc.collect()
        gc.disable()
        try:
            del model
            assert layers() is None, "something holds it"
        finally:
            gc.enable()


def recomputes_a_model_of_the_same_name_that_comes_later(device: torch.device) -> None:
    with moving(**WHOLE) as session:
        for _ in range(2):
            model = blocks(device)
            train(model, device, steps=12)
            assert recomputed(session) and all("forward" in vars(block.layers) for block in model)
            del model


def gives_a_shallow_copy_its_own_forward(device: torch.device) -> None:
    model = blocks(device)
    with moving(**WHOLE) as session:
        train(model, device)
        assert recomputed(session)
        x = batch(device, 0)
        twins = [copy.copy(model[1].layers), model[1].layers._replicate_for_data_parallel()]  # what DataParallel does
    for twin in twins:
        twin._modules = {"only": nn.Tanh()}
        assert torch.equal(twin(x), x.tanh())


def plans_nothing_for_modules_whose_forward_is_patched(device: torch.device) -> None:
    model = blocks(device)
    model[1].layers.forward = model[1].layers.forward  # as accelerate and many others do
    with moving(**WHOLE) as session:
        train(model, device)
        assert recomputed(session) == {"Sequential.0.layers", "Sequential.2.layers"}


if __name__ == "__main__":
    main("regions")
