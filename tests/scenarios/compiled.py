"""torch.compile: the whole model, block by block, beside what is dropped; and what must not make it recompile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.scenarios import (
    REMADE,
    Own,
    assert_same,
    batch,
    blocks,
    gradients,
    main,
    moved,
    moving,
    perceptron,
    recomputed,
    train,
)
from torch_tiers import migrator

Compile = Callable[[nn.Module], nn.Module]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(128), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def _train_compiled(compile_model: Compile, device: torch.device) -> list[Tensor]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(_Block() for _ in range(3))).to(device)
    return train(compile_model(model), device)


def _each(model: nn.Module, backend: str) -> nn.Module:
    for k, block in enumerate(model):
        model[k] = torch.compile(block, backend=backend)
    return model


def _in_place(model: nn.Module) -> nn.Module:
    model = Own(model)
    model.compile(backend="aot_eager")
    return model


def _each_in_place(model: nn.Module, backend: str) -> nn.Module:
    for block in model:
        block.compile(backend=backend)
    return model


def _all_modules_in_place(model: nn.Module, backend: str) -> nn.Module:
    for module in list(model.modules()):
        module.compile(backend=backend)
    return model


def the_whole_model(device: torch.device) -> None:
    for backend in ("eager", "aot_eager", "inductor"):
        print(f"  {backend}")
        whole = partial(torch.compile, backend=backend)
        assert_same(partial(_train_compiled, whole), device)
    print("  in place")  # what runs it is none of its methods: somebody has to tell all the same that it trains
    assert_same(partial(_train_compiled, _in_place), device)


def the_whole_model_without_a_graph_break(device: torch.device) -> None:
    """What stands before a module's call may be traced along with the model; it must not break its graph."""
    whole = partial(torch.compile, backend="aot_eager", fullgraph=True)
    assert_same(partial(_train_compiled, whole), device)


def every_block(device: torch.device) -> None:
    for compile_model, backend in (
        (_each, "aot_eager"),
        (_each_in_place, "inductor"),
        (_all_modules_in_place, "aot_eager"),
    ):
        print(f"  {compile_model.__name__.strip('_')}, {backend}")
        assert_same(partial(_train_compiled, partial(compile_model, backend=backend)), device)


def our_own_functions_are_not_compiled(device: torch.device) -> None:
    """Where a graph breaks, Dynamo takes up every Python function that is called, also from within autograd."""

    @torch.compile(backend="aot_eager")
    def broken(model: nn.Module, x: Tensor) -> Tensor:
        h = model[:2](x)
        torch._dynamo.graph_break()
        return model[2:](h * h).square().mean()

    @torch.compile(backend="aot_eager")
    def broken_within(model: nn.Module, x: Tensor) -> Tensor:
        try:  # Dynamo cannot go on within, so it runs all of this as it is, and takes up what that calls
            h = model(x)
            torch._dynamo.graph_break()
        finally:
            loss = (h * h).mean()
        loss.backward()
        return loss.detach()

    torch._dynamo.utils.clear_compilation_metrics()
    for recompute in (False, True):
        torch.compiler.reset()
        with moving(recompute=recompute) as session:
            model = perceptron(device)
            for step in range(6):
                broken_within(model, batch(device, step))
            train(_all_modules_in_place(perceptron(device), "aot_eager"), device)
            train(perceptron(device), device, loss_of=broken)
            assert moved(session)["h2d"] > 0
    functions = {(metrics.co_filename, metrics.co_name) for metrics in torch._dynamo.utils.get_compilation_metrics()}
    of_migrator = Path(migrator.__file__).parent
    ours = [(file, name) for file, name in functions if file and Path(file).is_relative_to(of_migrator)]
    print(f"  compiled {len(functions)} functions, of ours: {ours}")
    assert not ours


def nothing_compiles_anew_in_later_steps(device: torch.device) -> None:
    """Nor does anything that is compiled run again in backward, where what is beside it is made again."""
    runs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        return lambda *args: (runs.append(graph), graph(*args))[1]

    for arguments in ({}, REMADE):
        torch.compiler.reset()
        with moving(**arguments) as session, torch._dynamo.config.patch(error_on_recompile=True):
            model = torch.compile(perceptron(device), backend="aot_eager")
            train(model, device, steps=8)
            model = blocks(device)
            model[1].layers = torch.compile(Own(model[1].layers), backend=backend)
            train(model, device, steps=8)
            assert not arguments or recomputed(session)
            before = len(runs)
            train(model, device, steps=1)
            assert len(runs) == before + 1


def parts_that_are_compiled_beside_what_is_dropped(device: torch.device) -> None:
    """In place, wrapped and within; their statistics, random numbers and hooks count once."""

    def program(wrap: Callable[[nn.Module], nn.Module], device: torch.device) -> list[Tensor]:
        torch.compiler.reset()
        calls, model = list[str](), blocks(device, nn.BatchNorm1d(256), nn.Dropout(0.2))
        for block in model:
            block.layers = wrap(block.layers)
            block.layers.register_forward_hook(lambda *_: calls.append("forward"))
        next(module for module in model[2].modules() if isinstance(module, nn.Linear)).compile(backend="aot_eager")
        model[0].layers.compile(backend="aot_eager")
        model[1].layers = torch.compile(model[1].layers, backend="aot_eager")
        results = train(model, device)
        return [*results, *model.buffers(), torch.rand(4, device=device), torch.tensor(len(calls))]

    for wrap in (Own, lambda layers: layers):
        assert_same(partial(program, wrap), device, moves=False, **REMADE)
        with moving(**REMADE) as session:
            program(wrap, device)
            print(f"  dropped at {sorted(recomputed(session))}")
            assert recomputed(session)


def modules_can_be_copied_exported_scripted_and_traced(device: torch.device) -> None:
    """Compiled ones and others, while what they save is dropped."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Own(_Block()) for _ in range(3))).to(device), batch(device, 9)
    model[0].compile(backend="aot_eager")
    model[1] = torch.compile(model[1], backend="aot_eager")
    with moving(**REMADE) as session:
        train(model, device)
        assert recomputed(session)
        for k, block in enumerate(model):
            others = [copy.deepcopy(block), torch.export.export(block, (x,)).module()]
            if k != 1:
                others.append(torch.jit.script(block))
            if k == 2:
                others += [torch.jit.trace(block, x), torch.fx.symbolic_trace(block)]
            for other in others:
                torch.testing.assert_close(other(x), block(x))


def a_traced_graph_is_that_of_the_program_alone(device: torch.device) -> None:
    """Also of a first iteration, which is recorded, and whose operators are tried again."""

    def operators(model: nn.Module, x: Tensor) -> list[str]:
        traced = torch.jit.trace(model, (x,), check_trace=False).inlined_graph.nodes()
        exported = torch.export.export(model, (x,)).graph.nodes
        return [node.kind() for node in traced] + [str(node.target) for node in exported]

    torch.manual_seed(0)
    model, x = nn.Sequential(*(_Block() for _ in range(3))).to(device), batch(device, 9)
    expected = operators(model, x)
    with moving(**REMADE) as session:
        assert operators(model, x) == expected
        train(model, device)
        assert recomputed(session)
        assert operators(model, x) == expected


def a_model_compiled_before_the_session(device: torch.device) -> None:
    torch.compiler.reset()
    plain = perceptron(device)
    model = torch.compile(perceptron(device), backend="aot_eager")
    expected, results = train(plain, device, steps=6), train(model, device, steps=2)
    with moving() as session:
        results += _continued(model, device, range(2, 4))
        print(f"  {session.stats()['moved']}")
    results += _continued(model, device, range(4, 6))
    torch.testing.assert_close(results[-1], expected[-1])


def _continued(model: nn.Module, device: torch.device, numbers: range) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for i in numbers:
        optimizer.zero_grad()
        loss = model(batch(device, i)).square().mean()
        loss.backward()
        optimizer.step()
        results += [loss.detach(), *gradients(model)]
    return results


def torch_func_within_a_compiled_function(device: torch.device) -> None:
    """Dynamo knows `disable_saved_tensors_hooks` by identity, and torch.func enters it."""

    def program(device: torch.device) -> list[Tensor]:
        torch.compiler.reset()
        slope = torch.compile(torch.func.grad(lambda x: (x.sin() * x).sum()), backend="aot_eager", fullgraph=True)
        model = perceptron(device)
        results = []
        for i in range(3):
            results += [*train(model, device, steps=1), slope(batch(device, i))]
        return results

    assert_same(program, device)


def a_compiled_part_between_eager_parts(device: torch.device) -> None:
    def program(device: torch.device) -> list[Tensor]:
        torch.compiler.reset()
        middle = torch.compile(lambda h: torch.nn.functional.gelu(h * 2).cos(), backend="aot_eager")
        return train(perceptron(device), device, loss_of=lambda m, x: m[4:](middle(m[:4](x))).square().mean())

    assert_same(program, device)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(128, 3 * 128)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.projection(x).view(8, 256, 3, 4, 32).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*heads)
        return x + attended.transpose(1, 2).reshape(8, 256, 128)


def _train_attention(device: torch.device, steps: int = 4) -> list[Tensor]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(_Attention() for _ in range(3))).to(device)
    for block in model:
        block.compile(backend="inductor")
    return train(model, device, steps=steps, loss_of=lambda m, x: m(x.view(8, 256, 128)).square().mean())


def what_a_compiled_block_saves_in_parts_moves_once(device: torch.device) -> None:
    """Inductor hands the parts of a fused projection out as tensors of their own, each with a version counter."""
    assert_same(_train_attention, device)
    unique: dict[int, int] = {}

    def look(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor.untyped_storage().nbytes() >= 4096:
            unique[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        _train_attention(device, steps=1)
    with moving() as session:
        _train_attention(device, steps=6)
        (trace,) = session.runtime.saver().movers.armed[0].learner.traces
        before = moved(session)["d2h"]
        _train_attention(device, steps=1)
        went = moved(session)["d2h"] - before
    counted = sum({site.storage: site.nbytes for site in trace.sites}.values())
    print(f"  counted {counted} and moved {went} of {sum(unique.values())} bytes")
    assert 0 < counted <= sum(unique.values())
    assert 0 < went <= sum(unique.values())


def _goes_on(backend: str, stance: str, device: torch.device) -> None:
    """Check that what is saved is dropped also after compiled calls, within a forward and after it."""

    def program(device: torch.device) -> list[Tensor]:
        torch.compiler.reset()
        after = torch.compile(lambda loss: loss + 1, backend=backend)
        model = nn.Sequential(perceptron(device), Own(nn.Linear(128, 8))).to(device)
        model[1].compile(backend=backend)
        results = train(model, device)
        for i in range(4):
            with torch.compiler.set_stance(stance):
                loss = model(batch(device, i)).square().mean()
                results.append(after(loss.detach()))
            loss.backward()
            results += gradients(model)
        return results

    def twice() -> None:
        assert_same(program, device, moves=False, **REMADE)
        with moving(**REMADE) as session:
            program(device)
            assert recomputed(session), "nothing is recorded any more"

    with ThreadPoolExecutor(1) as pool:  # where recording ends it does so in this thread
        pool.submit(twice).result()


def recording_goes_on_after_a_compiled_function_between_forward_and_backward(device: torch.device) -> None:
    for backend in ("eager", "inductor", "aot_eager"):
        print(f"  {backend}")
        _goes_on(backend, "default", device)


def recording_goes_on_after_compiled_modules_ran_eagerly_for_now(device: torch.device) -> None:
    _goes_on("eager", "force_eager", device)


if __name__ == "__main__":
    main("compiled")
