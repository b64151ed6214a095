"""Traces as models leave them, worked out from their shapes, with the classes of their modules.

The two GPTs are those of `modelled`; the others are rougher, and made by a `Tape` alone.

A `Tape` is told the operations of a forward, in order; backward is their mirror image at twice the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.unit import modelled
from torch_tiers.allocator.sizes import GiB, MiB
from torch_tiers.migrator.model.trace import Recipe, Site, Trace

FLOPS = 450e12  # a second, bf16, as matrix products reach it
STREAMED = 2.0e12  # bytes a second that an elementwise kernel reads and writes


@dataclass
class Op:
    seconds: float
    saved: list[tuple[str, str, int]] = field(default_factory=list)  # key, kind, storage
    weights: int = 0  # bytes; as many of gradient appear in its backward


class Tape:
    """Writes down one forward; storages are numbers, sizes in bytes."""

    def __init__(self) -> None:
        self.nbytes: list[int] = []
        self._ops: list[Op] = []
        self._recipes: dict[int, Recipe] = {}
        self._counts: dict[str, int] = {}

    def new(self, nbytes: int) -> int:
        self.nbytes.append(nbytes)
        return len(self.nbytes) - 1

    def op(self, path: str, kind: str, saves: Sequence[int], seconds: float, weights: int = 0) -> None:
        op = Op(seconds, weights=weights)
        for storage in saves:
            number = self._counts[path] = self._counts.get(path, -1) + 1
            op.saved.append((f"{path}:{number}", kind, storage))
        self._ops.append(op)

    def product(self, path: str, x: int, out: int, flops: float, *, kind: str = "Linear", weights: int = 0) -> int:
        """A layer whose backward needs its input; the output is new."""
        self.op(path, kind, [x], flops / FLOPS, weights)
        made = self.new(out)
        self._recipes[made] = Recipe("convolution" if kind.startswith("Conv") else "mm", (x,), flops / FLOPS)
        return made

    def cheap(self, path: str, kind: str, inputs: Sequence[int], *, saves: Sequence[int] = (), name: str = "") -> int:
        """A layer that streams its inputs once and can do so again; the output is as large as its first input."""
        out = self.new(self.nbytes[inputs[0]])
        seconds = (sum(self.nbytes[k] for k in inputs) + self.nbytes[out]) / STREAMED
        self.op(path, kind, [out if k < 0 else k for k in saves], seconds)
        self._recipes[out] = Recipe(name or kind.lower(), tuple(inputs), seconds)
        return out

    def trace(self, fixed: int, working: int, loss: int = 0) -> Trace:
        """The iteration: `fixed` bytes all along, `working` besides, `loss` more where backward begins."""
        keys: dict[str, list[int]] = {}
        saved = {storage for op in self._ops for _, _, storage in op.saved}
        births: dict[str, int] = {}
        times: list[float] = []
        others: list[int] = []
        now, grown = 0.0, fixed + working
        for op in self._ops:
            now += op.seconds
            for key, _, _ in op.saved:
                births[key] = len(times)
                times.append(now)
                others.append(grown)
        turn, largest = len(times), loss
        for op in reversed(self._ops):
            for key, _, _ in op.saved:
                keys.setdefault(key, []).append(len(times))
                times.append(now)
                others.append(grown + largest)
                largest = 0
            now += 2 * op.seconds
            grown += op.weights
        others.append(grown)
        sites = tuple(
            Site(key, storage, self.nbytes[storage], births[key], tuple(keys[key]), kind)
            for op in self._ops
            for key, kind, storage in op.saved
        )
        recipes = {out: recipe for out, recipe in self._recipes.items() if out in saved and saved >= {*recipe.inputs}}
        assert turn == len(sites)
        return Trace(sites, len(times), tuple(times), now * 1.05, tuple(others), recipes)


def attention_block(tape: Tape, path: str, x: int, batch: int, length: int, width: int, act: str) -> int:
    """A pre-norm transformer block with fused attention."""
    tokens, statistics = batch * length, 4 * batch * length
    unit = 2 * tokens * width
    per_product = 2.0 * tokens * width * width

    def norm(name: str, x: int) -> int:
        small = [tape.new(statistics), tape.new(statistics)]
        return tape.cheap(f"{path}.{name}", "LayerNorm", [x], saves=[x, *small], name="native_layer_norm")

    def linear(name: str, x: int, out: int) -> int:
        return tape.product(f"{path}.{name}", x, out * unit, (tape.nbytes[x] // unit) * out * per_product,
                            weights=2 * (tape.nbytes[x] // unit) * out * width * width)  # fmt: skip

    qkv = linear("qkv", norm("norm1", x), 3)
    attended = tape.new(unit)
    tape.op(path, "Block", [qkv, attended, tape.new(2 * statistics)], 4.0 * tokens * length * width / FLOPS)
    linear("proj", attended, 1)
    x = tape.new(unit)
    wide = linear("expand", norm("norm2", x), 4)
    linear("contract", tape.cheap(f"{path}.{act.lower()}", act, [wide], saves=[wide]), 1)
    return tape.new(unit)


def transformer(blocks: int, batch: int, length: int, width: int, vocabulary: int, name: str, act: str) -> Trace:
    tape = Tape()
    unit = 2 * batch * length * width
    x = tape.new(unit)
    for k in range(blocks):
        x = attention_block(tape, f"{name}.blocks.{k}", x, batch, length, width, act)
    small = tape.new(4 * batch * length)
    x = tape.cheap(f"{name}.norm", "LayerNorm", [x], saves=[x, small], name="native_layer_norm")
    logits = tape.product(f"{name}.head", x, 4 * batch * length * vocabulary, 2.0 * batch * length * width * vocabulary)
    tape.op("", "", [logits], tape.nbytes[logits] / STREAMED)
    weights = 2 * (12 * blocks * width * width + 2 * vocabulary * width)
    return tape.trace(fixed=3 * weights, working=8 * unit, loss=tape.nbytes[logits])


def bert() -> Trace:
    """BERT large, with dropout behind both halves of a block left out."""
    return transformer(24, 32, 512, 1024, 30_522, "Bert", "GELU")


def vit() -> Trace:
    """ViT-L/16 on 224 x 224."""
    return transformer(24, 128, 197, 1024, 1000, "ViT", "GELU")


def conv_norm_act(tape: Tape, path: str, x: int, pixels: int, width_in: int, width: int, kernel: int, act: str) -> int:
    """Convolution, batch norm, activation in place; `pixels` of the output over the whole batch."""
    out = tape.product(f"{path}.conv", x, 2 * pixels * width, 2.0 * pixels * width_in * width * kernel**2,
                       kind="Conv2d", weights=4 * width_in * width * kernel**2)  # fmt: skip
    small = tape.new(8 * width)
    return tape.cheap(f"{path}.{act.lower()}", act, [out], saves=[out, small, -1])


def resnet(depths: Sequence[int] = (3, 8, 36, 3), batch: int = 256) -> Trace:
    """ResNet-152 under autocast."""
    tape = Tape()
    pixels = batch * 112 * 112
    x = conv_norm_act(tape, "ResNet.stem", tape.new(2 * batch * 3 * 224 * 224), pixels, 3, 64, 7, "ReLU")
    pixels //= 4
    tape.op("ResNet.maxpool", "MaxPool2d", [x], tape.nbytes[x] / STREAMED)
    x, into = tape.new(2 * pixels * 64), 64
    for stage, depth in enumerate(depths):
        width = 64 << stage
        for k in range(depth):
            path = f"ResNet.layer{stage + 1}.{k}"
            y = conv_norm_act(tape, f"{path}.1", x, pixels, into, width, 1, "ReLU")
            if k == 0 and stage:
                pixels //= 4
            y = conv_norm_act(tape, f"{path}.2", y, pixels, width, width, 3, "ReLU")
            y = tape.product(f"{path}.3.conv", y, 8 * pixels * width, 8.0 * pixels * width * width,
                             kind="Conv2d", weights=16 * width * width)  # fmt: skip
            out = tape.new(8 * pixels * width)
            tape.op(f"{path}.3.norm", "BatchNorm2d", [y, tape.new(32 * width)], 2 * tape.nbytes[y] / STREAMED)
            tape.op(f"{path}.relu", "ReLU", [out], 3 * tape.nbytes[out] / STREAMED)
            x, into = out, 4 * width
    tape.product("ResNet.fc", tape.new(4 * batch * into), 4 * batch * 1000, 2.0 * batch * into * 1000)
    return tape.trace(fixed=GiB, working=2 * GiB)


def unet(widths: Sequence[int] = (64, 128, 256, 512), batch: int = 16, side: int = 256) -> Trace:
    """Two convolutions a level, down and up again; what goes across lives long."""
    tape = Tape()
    x, into, skips = tape.new(2 * batch * 3 * side * side), 3, []
    pixels = batch * side * side
    for level, width in enumerate(widths):
        for k in range(2):
            x = conv_norm_act(tape, f"UNet.down.{level}.{k}", x, pixels, into, width, 3, "SiLU")
            into = width
        skips.append(x)
        tape.op(f"UNet.pool.{level}", "MaxPool2d", [x], tape.nbytes[x] / STREAMED)
        pixels //= 4
        x = tape.new(2 * pixels * width)
    for level, width in reversed(list(enumerate(widths))):
        pixels *= 4
        x = tape.product(
            f"UNet.enlarge.{level}", x, 2 * pixels * width, 2.0 * pixels * into * width, kind="ConvTranspose2d"
        )
        across = skips.pop()
        joined = tape.new(tape.nbytes[x] + tape.nbytes[across])
        tape.op("UNet", "UNet", [], 2 * tape.nbytes[joined] / STREAMED)
        x, into = joined, 2 * width
        for k in range(2):
            x = conv_norm_act(tape, f"UNet.up.{level}.{k}", x, pixels, into, width, 3, "SiLU")
            into = width
    tape.product("UNet.outward", x, 6 * pixels, 6.0 * pixels * into, kind="Conv2d")
    return tape.trace(fixed=GiB // 2, working=GiB)


def moe(blocks: int = 12, experts: int = 8, batch: int = 8, length: int = 1024, width: int = 1024) -> Trace:
    """Every token goes to one of the experts, unevenly."""
    tape = Tape()
    tokens = batch * length
    x = tape.new(2 * tokens * width)
    for b in range(blocks):
        path = f"MoE.blocks.{b}"
        x = attention_block(tape, path, x, batch, length, width, "GELU")
        y = tape.cheap(f"{path}.norm", "LayerNorm", [x], saves=[x], name="native_layer_norm")
        tape.product(f"{path}.router", y, 4 * tokens * experts, 2.0 * tokens * width * experts)
        for e in range(experts):
            share = tokens // experts * (2 + e % 3) // 3
            rows = tape.new(2 * share * width)
            flops = 8.0 * share * width * width
            wide = tape.product(f"{path}.experts.{e}.0", rows, 8 * share * width, flops, weights=8 * width * width)
            wide = tape.cheap(f"{path}.experts.{e}.1", "GELU", [wide], saves=[wide])
            tape.product(f"{path}.experts.{e}.2", wide, 2 * share * width, flops, weights=8 * width * width)
        x = tape.new(2 * tokens * width)
    return tape.trace(fixed=8 * GiB, working=GiB)


def lstm(layers: int = 4, steps: int = 64, batch: int = 512, width: int = 2048) -> Trace:
    """Cells one by one: many small tensors."""
    tape = Tape()
    state = 2 * batch * width
    inputs = [tape.new(state) for _ in range(steps)]
    for layer in range(layers):
        path, h, outputs = f"LSTM.cells.{layer}", tape.new(state), []
        for x in inputs:
            gates = tape.new(4 * state)
            tape.op(path, "LSTMCell", [x, h], 16.0 * batch * width * width / FLOPS, 0)
            cell = tape.cheap(path, "LSTMCell", [gates], saves=[gates, -1], name="tanh")
            h = tape.new(state)
            tape.op(path, "LSTMCell", [cell], 3 * state / STREAMED)
            outputs.append(h)
        inputs = outputs
    return tape.trace(fixed=GiB, working=256 * MiB)


SAMPLES: dict[str, Callable[[], Trace]] = {
    "gpt": modelled.gpt,
    "long_gpt": modelled.long_context_gpt,
    "bert": bert,
    "vit": vit,
    "resnet": resnet,
    "unet": unet,
    "moe": moe,
    "lstm": lstm,
}
