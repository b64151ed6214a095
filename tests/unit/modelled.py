"""Traces of real models, made from their shapes: what a recorder would write, without a GPU.

Times follow from the arithmetic and the traffic of each operation at the speeds of an H100; the reference GPT's
come out at its measured step (273 ms) and peak (37.6 GiB). Others are what a program has besides its saved
tensors: weights, optimizer state, gradients as they come, and what an operation needs while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_tiers.allocator.sizes import KiB
from torch_tiers.migrator.model.trace import Recipe, Site, Trace

MATMUL = 620e12  # floating-point operations a second
ATTENTION = 380e12
TRAFFIC = 2.6e12  # bytes a second


@dataclass
class _Op:
    path: str
    forward: float
    backward: float
    inputs: Sequence[int]  # saved before it runs
    outputs: Sequence[int]  # saved after it ran
    transient: int
    gradients: int


class Modeller:
    """Collects the operations of a forward; `trace` plays them forwards and backwards."""

    def __init__(self, static: int) -> None:
        self.static = static
        self.sizes: list[int] = []
        self.ops: list[_Op] = []
        self.recipes: dict[int, Recipe] = {}

    def storage(self, nbytes: float) -> int:
        self.sizes.append(int(nbytes))
        return len(self.sizes) - 1

    def op(
        self,
        path: str,
        forward: float,
        inputs: Sequence[int] = (),
        outputs: Sequence[int] = (),
        *,
        transient: float = 0,
        gradients: float = 0,
        backward: float | None = None,
    ) -> None:
        backward = 2 * forward if backward is None else backward
        self.ops.append(_Op(path, forward, backward, inputs, outputs, int(transient), int(gradients)))

    def recipe(self, made: int, op: str, inputs: tuple[int, ...], seconds: float) -> None:
        self.recipes[made] = Recipe(op, inputs, seconds)

    def trace(self, optimizer: float) -> Trace:
        times: list[float] = []
        others: list[int] = []
        saved: list[list[tuple[str, int, int]]] = []
        clock, most = 0.0, self.static

        def position(others_before: int) -> int:
            times.append(clock)
            others.append(others_before)
            return len(times) - 1

        numbers: dict[str, int] = {}
        for op in self.ops:
            mine: list[tuple[str, int, int]] = []
            for step, storages in enumerate((op.inputs, op.outputs)):
                if step:
                    clock += op.forward
                    most = self.static + op.transient
                for storage in storages:
                    number = numbers[op.path] = numbers.get(op.path, -1) + 1
                    mine.append((f"{op.path}:{number}", storage, position(most)))
                    most = self.static
            saved.append(mine)
        grown = 0
        uses: dict[str, int] = {}
        for op, mine in zip(reversed(self.ops), reversed(saved), strict=True):
            for key, _, _ in mine:
                uses[key] = position(most)
                most = self.static + grown
            clock += op.backward
            most = max(most, self.static + grown + op.transient + op.gradients)
            grown += op.gradients
        others.append(max(most, self.static + grown))
        sites = [
            Site(key, storage, self.sizes[storage], at, (uses[key],)) for mine in saved for key, storage, at in mine
        ]
        known = {site.storage for site in sites}
        recipes = {k: recipe for k, recipe in self.recipes.items() if known >= {k, *recipe.inputs}}
        return Trace(tuple(sites), len(times), tuple(times), clock + optimizer, tuple(others), recipes)


def gpt(
    blocks: int = 24, width: int = 2048, heads: int = 16, vocabulary: int = 32_000, batch: int = 8, length: int = 2048
) -> Trace:
    """A pre-norm GPT in bf16, as `benchmarks.workloads.reference_gpt` builds it."""
    tokens = batch * length
    unit = 2 * tokens * width
    parameters = 12 * blocks * width**2 + 2 * vocabulary * width + length * width
    model = Modeller(6 * parameters)  # weights, and two moments, in bf16

    def linear(path: str, into: int, out: int, saved: int, *more: int) -> int:
        """What is made of `saved`, and has `more` added to it, is saved by somebody later, if at all."""
        seconds = 2 * tokens * into * out / MATMUL
        model.op(path, seconds, [saved], transient=2 * tokens * max(into, out), gradients=2 * into * out)
        made = model.storage(2 * tokens * out)
        model.recipe(made, "addmm", (saved, *more), seconds + (3 * unit / TRAFFIC if more else 0))
        return made

    def norm(path: str, x: int) -> int:
        seconds = 2 * unit / TRAFFIC
        statistics = [model.storage(4 * tokens), model.storage(4 * tokens)]
        model.op(path, seconds, [x], statistics, transient=2 * unit, backward=1.5 * seconds)
        made = model.storage(unit)
        model.recipe(made, "native_layer_norm", (x,), seconds)
        return made

    x = model.storage(unit)
    for number in range(blocks):
        path = f"blocks.{number}"
        qkv = linear(f"{path}.qkv", width, 3 * width, norm(f"{path}.norm1", x))
        attended, logsumexp = model.storage(unit), model.storage(4 * heads * tokens)
        flops = 2 * tokens * length * width  # causal: half of four
        model.op(
            path, flops / ATTENTION, [qkv], [attended, logsumexp],
            backward=2.5 * flops / ATTENTION, transient=3 * unit,
        )  # fmt: skip
        for made in (attended, logsumexp):
            model.recipe(made, "attention", (qkv,), flops / ATTENTION)
        middle = linear(f"{path}.proj", width, width, attended, x)
        model.op(path, 3 * unit / TRAFFIC, transient=unit, backward=unit / TRAFFIC)
        expanded, activated = (
            linear(f"{path}.expand", width, 4 * width, norm(f"{path}.norm2", middle)),
            model.storage(4 * unit),
        )
        gelu = 8 * unit / TRAFFIC
        model.op(f"{path}.gelu", gelu, [expanded], transient=4 * unit, backward=1.5 * gelu)
        model.recipe(activated, "gelu", (expanded,), gelu)
        x = linear(f"{path}.contract", 4 * width, width, activated, middle)
        model.op(path, 3 * unit / TRAFFIC, transient=unit, backward=unit / TRAFFIC)
    linear("head", width, vocabulary, norm("norm", x))
    logits = tokens * vocabulary
    model.op(
        "", 6 * logits / TRAFFIC, [], [model.storage(4 * logits)], transient=6 * logits, backward=8 * logits / TRAFFIC
    )
    return model.trace(optimizer=12e-12 * parameters)


def long_context_gpt() -> Trace:
    """The reference GPT with one sequence of 32,768 tokens."""
    return gpt(vocabulary=4096, batch=1, length=32_768)


def resnet(layers: Sequence[int] = (3, 8, 36, 3), batch: int = 256, side: int = 224) -> Trace:
    """A bottleneck ResNet under autocast; activations are changed in place."""
    model = Modeller(60_000_000 * 8)

    def convolution(path: str, x: int, into: int, out: int, kernel: int, pixels: int) -> int:
        flops = 2 * batch * pixels * kernel**2 * into * out
        traffic = 2 * batch * pixels * (into + out)
        made = model.storage(2 * batch * pixels * out)
        seconds = max(flops / (0.5 * MATMUL), traffic / TRAFFIC)
        model.op(path, seconds, [x], transient=traffic, gradients=4 * kernel**2 * into * out)
        model.recipe(made, "convolution", (x,), seconds)
        return made

    def normalised(path: str, x: int, relu: bool) -> int:
        nbytes = model.sizes[x]
        made = model.storage(nbytes)
        seconds = 3 * nbytes / TRAFFIC
        model.op(path, seconds, [x], [model.storage(8 * KiB)], transient=nbytes)
        if relu:
            model.op(f"{path}.relu", 2 * nbytes / TRAFFIC, [], [made], backward=3 * nbytes / TRAFFIC)
        model.recipe(made, "native_batch_norm", (x,), seconds + relu * 2 * nbytes / TRAFFIC)
        return made

    pixels = (side // 4) ** 2
    x = normalised("stem.1", convolution("stem.0", model.storage(6 * batch * side**2), 3, 64, 7, 4 * pixels), True)
    into = 64
    for stage, count in enumerate(layers):
        width = 64 << stage
        for number in range(count):
            path, before = f"stages.{stage}.{number}", pixels
            pixels //= 4 if stage and not number else 1
            y = normalised(f"{path}.1", convolution(f"{path}.0", x, into, width, 1, before), True)
            y = normalised(f"{path}.4", convolution(f"{path}.3", y, width, width, 3, pixels), True)
            y = convolution(f"{path}.6", y, width, 4 * width, 1, pixels)
            nbytes = model.sizes[y]
            normalised(f"{path}.7", y, False)
            across = x
            if not number:
                across = convolution(f"{path}.p", x, into, 4 * width, 1, pixels)
                normalised(f"{path}.s", across, False)
            x = model.storage(nbytes)
            model.op(f"{path}.relu", 5 * nbytes / TRAFFIC, [], [x], backward=3 * nbytes / TRAFFIC)
            model.recipe(x, "relu", (y, across), 8 * nbytes / TRAFFIC)
            into = 4 * width
    model.op("head", 1e-4, [model.storage(2 * batch * into)])
    return model.trace(optimizer=1.5e-3)
