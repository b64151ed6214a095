"""Recomputation of whole modules that the program has compiled, in place or wrapped; and what must not notice."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.scenarios import (
    WHOLE,
    Own,
    any_module,
    assert_same,
    batch,
    blocks,
    main,
    moving,
    perceptron,
    recomputed,
    train,
)
from torch_tiers.migrator.hooks.compiled import may_run_twice
from torch_tiers.migrator.hooks.sites import Modules
from torch_tiers.migrator.recompute.regions import Regions


def _compilable(device: torch.device, *extra: nn.Module) -> nn.Sequential:
    torch.compiler.reset()
    model = blocks(device, *extra)
    for block in model:
        block.layers = Own(block.layers)
    return model


def recomputes_compiled_modules_and_leaves_those_alone_with_a_compiled_one_within(device: torch.device) -> None:
    def program(device: torch.device, make: Callable[..., nn.Sequential] = _compilable) -> list[Tensor]:
        torch.compiler.reset()
        model = make(device)
        model[0].layers.compile(backend="aot_eager")
        model[1].layers = torch.compile(model[1].layers, backend="aot_eager")
        next(model[2].layers.children()).compile(backend="aot_eager")
        return train(model, device)

    for make in (_compilable, blocks):
        assert_same(partial(program, make=make), device, moves=False, **WHOLE)
        within = {"Sequential.2.layers.inner"} if make is _compilable else set()
        with moving(**WHOLE) as session:
            program(device, make)
            assert recomputed(session) == {"Sequential.0.layers", "Sequential.1.layers", *within}


def runs_again_what_was_compiled_and_compiles_nothing_anew(device: torch.device) -> None:
    runs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return lambda *args: (runs.append(graph), graph(*args))[1]

    model = _compilable(device)
    model[0].layers.compile(backend=backend)
    wrapped = torch.compile(model[1].layers, backend=backend)
    plain = model[0].layers._compiled_call_impl
    model[1].layers, forward = wrapped, vars(wrapped)["forward"]
    train(model, device, steps=1)  # once for the input that wants no gradient, and once for those that do
    with moving(**WHOLE) as session, torch._dynamo.config.patch(error_on_recompile=True):
        train(model, device, steps=8)
        assert recomputed(session) == {"Sequential.0.layers", "Sequential.1.layers", "Sequential.2.layers.inner"}
        before = len(runs)
        train(model, device, steps=1)
        print(f"  {len(runs) - before} runs in a step")
        assert len(runs) - before == 2 * 2, "two forwards, and each of them again in backward"
        copied = copy.deepcopy(model[0].layers)
        assert vars(copied).get("_compiled_call_impl") is None, "a copy is not compiled, as ever"
    assert vars(model[0].layers)["_compiled_call_impl"] is plain
    assert vars(wrapped)["forward"] is forward
    before = len(runs)
    train(model, device, steps=1)
    assert len(runs) - before == 2


def leaves_it_to_the_program_to_copy_script_and_export_what_it_has_compiled(device: torch.device) -> None:
    class Plain(Own):
        def __getstate__(self) -> dict[str, Any]:
            return self.__dict__

    model = _compilable(device)
    model[0].layers = Plain(model[0].layers.inner)
    model[0].layers.compile(backend="aot_eager")
    model[1].layers = torch.compile(model[1].layers, backend="aot_eager")
    x = batch(device, 9)
    with moving(**WHOLE) as session:
        train(model, device)
        assert {"Sequential.0.layers", "Sequential.1.layers"} <= recomputed(session)
        for block in model[:2]:
            block.layers.eval()
            expected = block.layers(x)
            torch.testing.assert_close(copy.deepcopy(block.layers)(x), expected)
            saved = io.BytesIO()
            torch.save(block.layers.state_dict(), saved)
            exported = torch.export.export(block.layers, (x,)).module()
            torch.testing.assert_close(exported(x), expected)
        scripted = torch.jit.script(model[0].layers)
        torch.testing.assert_close(scripted(x), model[0].layers(x))


def recomputes_nothing_of_a_forward_that_runs_eagerly_for_now(device: torch.device) -> None:
    """Backward would run what is compiled, which saves other tensors."""

    def program(device: torch.device) -> list[Tensor]:
        model = _compilable(device)
        for block in model:
            block.layers.compile(backend="aot_eager")
        results = train(model, device)
        for step in range(2):
            with torch.compiler.set_stance("force_eager"):
                loss = model(batch(device, step)).square().mean()
            loss.backward()
            results += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        return results

    assert_same(program, device, moves=False, **WHOLE)


def knows_a_wrapper_by_its_class_and_not_by_that_one_s_name(device: torch.device) -> None:
    class OptimizedModule(Own):
        pass

    def program(device: torch.device) -> list[Tensor]:
        model = _compilable(device)
        model[0].layers = OptimizedModule(model[0].layers)
        return train(model, device)

    assert_same(program, device, moves=False, **WHOLE)


def runs_no_cuda_graphs_again(device: torch.device) -> None:
    """They would be captured anew in backward."""
    import torch._inductor.config as inductor

    def compiled(**arguments: Any) -> list[nn.Module]:
        in_place = Own(nn.Linear(4, 4))
        in_place.compile(**arguments)
        return [in_place, torch.compile(Own(nn.Linear(4, 4)), **arguments)]

    assert all(map(may_run_twice, compiled()))
    graphs = compiled(mode="reduce-overhead") + compiled(options={"triton.cudagraphs": True})
    assert not any(map(may_run_twice, graphs))
    with inductor.patch({"triton.cudagraphs": True}):
        assert not any(map(may_run_twice, compiled()))


def a_module_that_two_threads_train_is_recomputed_for_the_first(device: torch.device) -> None:
    """Either has plans of its own, and each counts on what it has planned."""
    for wrapped in (False, True):
        module: nn.Module = Own(nn.Linear(4, 4))
        if wrapped:
            module = torch.compile(module, backend="eager")
        else:
            module.compile(backend="eager")
        before = dict(vars(module))
        first, second = (Regions(Modules(), lambda: True) for _ in range(2))
        with any_module():
            assert first.know("M.own", module) and second.know("M.own", module)
        first.apply(["M.own"])
        second.apply(["M.own"])
        second.apply([])
        assert not may_run_twice(module), "the first one's stays"
        first.apply([])
        assert may_run_twice(module) and vars(module) == before


def tells_of_a_whole_model_that_is_compiled_in_place(device: torch.device) -> None:
    """What runs it is none of its methods: somebody has to tell all the same that it trains."""

    def program(device: torch.device) -> list[Tensor]:
        torch.compiler.reset()
        model = Own(perceptron(device))
        model.compile(backend="aot_eager")
        return train(model, device)

    assert_same(program, device)


def counts_and_draws_once_in_compiled_modules(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        model = _compilable(device, nn.BatchNorm1d(256), nn.Dropout(0.2))
        for block in model:
            block.layers.compile(backend="aot_eager")
        return [*train(model, device), *(buffer.clone() for buffer in model.buffers()), torch.rand(4, device=device)]

    assert_same(program, device, moves=False, **WHOLE)
    with moving(**WHOLE) as session:
        program(device)
        assert recomputed(session)


def calls_hooks_that_were_compiled_along_once(device: torch.device) -> None:
    calls = []
    model = _compilable(device)
    model[1].layers.register_forward_hook(lambda *_: calls.append("forward"))
    for block in model:
        block.layers.compile(backend="eager")
    with moving(**WHOLE) as session:
        train(model, device, steps=6)
        assert recomputed(session) == {"Sequential.0.layers", "Sequential.2.layers"}
    assert len(calls) == 6


if __name__ == "__main__":
    main("compiled_regions")
