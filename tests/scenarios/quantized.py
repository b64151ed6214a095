"""Weights in few bits, of classes of their own: they count as weights, and are streamed."""

from __future__ import annotations

import ctypes
import itertools
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_tiers as tiers
from tests.scenarios import (
    assert_same_streamed,
    batch,
    bytes_streamed,
    gradients,
    main,
    streamed,
)
from torch_tiers.migrator.program import weights
from torch_tiers.migrator.runtime.models import Models

WIDTH = 128


class _Scales:
    """As bitsandbytes' `QuantState`: what is needed besides a weight to compute with it. Its scales may have scales."""

    def __init__(self, absmax: Tensor, state2: _Scales | None = None) -> None:
        self.absmax, self.state2 = absmax, state2

    def whole(self) -> Tensor:
        return self.absmax if self.state2 is None else self.absmax.to(torch.float32) * self.state2.absmax


class _Packed(nn.Parameter):
    """As bitsandbytes' `Params4bit`: a parameter on integers, with its scales beside it, that sees what is called."""

    quant_state: _Scales
    asked: ClassVar[list[Any]] = []

    def __new__(cls, data: Tensor, quant_state: _Scales | None = None) -> _Packed:
        made: Any = torch.Tensor._make_subclass(cls, data, False)
        made.quant_state = quant_state
        return made

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.asked.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})

    def dequantize(self) -> Tensor:
        return self.as_subclass(Tensor).to(torch.float32) * self.quant_state.whole()


class _Wrapped(Tensor):
    """As torchao's: a wrapper that has no memory, and computes with integers and scales that have."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> _Wrapped:
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.integers, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["integers", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: object) -> _Wrapped:
        return cls(inner["integers"], inner["scale"])

    def dequantize(self) -> Tensor:
        return self.integers.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear:
            return F.linear(args[0], args[1].dequantize())
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].integers.detach(), args[0].scale.detach())
        if function is torch.ops.aten.clone.default:
            return cls(args[0].integers.clone(), args[0].scale.clone())
        assert function is torch.ops.aten.copy_.default, function
        args[0].integers.copy_(args[1].integers)
        args[0].scale.copy_(args[1].scale)
        return args[0]


def _in_eight_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


def _packed(weight: Tensor) -> Tensor:
    data, scale = _in_eight_bits(weight)
    return _Packed(data, _Scales(scale))


def _packed_twice(weight: Tensor) -> Tensor:
    data, scale = _in_eight_bits(weight)
    return _Packed(data, _Scales((scale / scale.max() * 255).to(torch.uint8), _Scales(scale.max() / 255)))


def _wrapped(weight: Tensor) -> Tensor:
    return nn.Parameter(_Wrapped(*_in_eight_bits(weight)), requires_grad=False)


MAKERS: dict[str, Callable[[Tensor], Tensor]] = {"packed": _packed, "packed twice": _packed_twice, "wrapped": _wrapped}


class _Layer(nn.Module):
    """A linear layer whose weight is in few bits."""

    def __init__(self, make: Callable[[Tensor], Tensor], device: torch.device) -> None:
        super().__init__()
        self.weight: Any = make(torch.randn(WIDTH, WIDTH).to(device) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.dequantize() if isinstance(self.weight, _Packed) else self.weight)


class _Converting(_Layer):
    """Lays its weight out anew in its first forward, as bitsandbytes does on some CPUs."""

    converted = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.converted:
            self.weight.data, self.converted = self.weight.data.flip(1).contiguous(), True
        return F.linear(x, self.weight.dequantize().flip(1))


def _frozen(make: Callable[[Tensor], Tensor], device: torch.device, layer: type[_Layer] = _Layer) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*itertools.chain.from_iterable((layer(make, device), nn.Tanh()) for _ in range(4)))


def _with_adapters(frozen: nn.Sequential, device: torch.device) -> nn.Sequential:
    adapters = (nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)).to(device) for _ in frozen)
    return nn.Sequential(*itertools.chain.from_iterable(zip(frozen, adapters, strict=True)))


def _train(model: nn.Module, device: torch.device, steps: int, each: Callable[[int], Sequence[Tensor]]) -> list[Tensor]:
    optimizer, results = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), []
    for i in range(steps):
        loss = model(batch(device, i)).square().mean()
        loss.backward()
        results += [loss.detach(), *gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
        results += each(i)
    return results


def trains_adapters(device: torch.device) -> None:
    def program(device: torch.device, make: Callable[[Tensor], Tensor], layer: type[_Layer]) -> Sequence[Tensor]:
        return _train(_with_adapters(_frozen(make, device, layer), device), device, 4, lambda _: ())

    for make, layer in (*((make, _Layer) for make in MAKERS.values()), (_packed, _Converting)):
        assert_same_streamed(partial(program, make=make, layer=layer), device)


def copies_each_weight(device: torch.device) -> None:
    """Of a model that has nothing else; and the program's class is asked for nothing."""
    for name, make in MAKERS.items():
        model = _frozen(make, device)
        weights: list[Any] = [layer.weight for layer in model if isinstance(layer, _Layer)]
        nbytes = sum(each.integers.nbytes if name == "wrapped" else each.nbytes for each in weights)
        with streamed(), tiers.session(allocator="torch", dram="64MiB") as session, torch.no_grad():
            _Packed.asked.clear()
            model(batch(device, 0))
            asked = set(_Packed.asked)
            copied = bytes_streamed(session)
        assert asked <= {Tensor.as_subclass}, f"{name}: {asked}"
        assert copied >= nbytes, f"{name}: {copied} of {nbytes}"


def hands_copies_to_kernels_of_bitsandbytes(device: torch.device) -> None:
    """They are operators by their names, and take the addresses of what they are given."""
    name = "dequantize_4bit"
    schema = "(Tensor A, Tensor absmax, int blocksize, str quant_type, int[] shape, ScalarType dtype) -> Tensor"
    read = set[int]()

    def dequantize(data: Tensor, absmax: Tensor, *_: object) -> Tensor:
        read.add(data.data_ptr())
        if data.is_cpu:
            data = torch.frombuffer(ctypes.string_at(data.data_ptr(), data.nbytes), dtype=data.dtype).view(data.shape)
        return data * absmax

    class Layer(_Layer):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight.as_subclass(Tensor)
            kernel = getattr(torch.ops.bitsandbytes, name)
            return F.linear(x, kernel(weight, self.weight.quant_state.absmax, 0, "", weight.shape, x.dtype))

    where: list[int] = []

    def program(device: torch.device) -> Sequence[Tensor]:
        model = _with_adapters(_frozen(_packed, device, Layer), device)
        where[:] = [each.data_ptr() for each in model.parameters() if type(each) is _Packed]
        read.clear()
        return _train(model, device, 4, lambda _: ())

    with torch.library._scoped_library("bitsandbytes", "FRAGMENT") as library, warnings.catch_warnings(action="ignore"):
        library.define(name + schema)
        library.impl(name, dequantize, "CompositeExplicitAutograd")
        assert_same_streamed(program, device)
    assert len(where) == 4 and read and not read & {*where}


def saves_and_loads_while_it_trains(device: torch.device) -> None:
    """And other weights come in the place of these."""

    def saved(model: nn.Module) -> dict[str, Any]:
        return {name: value.clone() for name, value in model.state_dict().items()}

    def program(device: torch.device, make: Callable[[Tensor], Tensor]) -> Sequence[Tensor]:
        model = _with_adapters(_frozen(make, device), device)
        other = saved(_with_adapters(_frozen(lambda weight: make(weight.flip(0)), device), device))

        def save_and_load(i: int) -> list[Tensor]:
            now = saved(model)
            if i in (2, 4):
                model.load_state_dict(other)
                other.update(now)
            return [
                each.dequantize() if isinstance(each, _Wrapped) else each.as_subclass(Tensor) for each in now.values()
            ]

        return _train(model, device, 6, save_and_load)

    for make in MAKERS.values():
        assert_same_streamed(partial(program, make=make), device)


def sees_what_is_written_to_integers_and_scales(device: torch.device) -> None:
    """Within a forward, by whatever name."""

    class Changing(nn.Module):
        def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.layer = _Layer(make, device)

        def forward(self, x: Tensor) -> Tensor:
            weight = self.layer.weight
            h = self.layer(x)
            if isinstance(weight, _Packed):
                weight.data.neg_()
                weight.quant_state.absmax.mul_(2)
            else:
                weight.integers.neg_()
                weight.scale.mul_(2)
            return h + self.layer(x)

    def program(device: torch.device, make: Callable[[Tensor], Tensor]) -> Sequence[Tensor]:
        torch.manual_seed(0)
        model = Changing(make)
        with torch.no_grad():
            return [model(batch(device, i)).clone() for i in range(4)]

    for make in (_packed, _wrapped):
        assert_same_streamed(partial(program, make=make), device)


def counts_as_weights_do_that_are_plain(device: torch.device) -> None:
    """So do integers in buffers, which are not streamed."""
    buffers = nn.Module()
    buffers.register_buffer("qweight", torch.zeros(WIDTH, WIDTH, dtype=torch.int8, device=device))
    models = {"packed": _Layer(_packed, device), "wrapped": _Layer(_wrapped, device), "buffers": buffers}
    for name, model in models.items():
        known = Models(lambda _: 0)
        known.add(model)
        here = next(iter(known.tensors())).device  # with its number
        nbytes = weights.bytes_on(here, known.tensors())
        assert nbytes >= WIDTH * WIDTH, f"{name}: {nbytes}"
        streamable = weights.bytes_on(here, known.parameters())
        assert streamable == (0 if name == "buffers" else nbytes), f"{name}: {streamable}"


def leaves_alone_what_does_not_tell_its_parts(device: torch.device) -> None:
    """A wrapper that only its class can look into, and a parameter that has no memory before the first forward."""

    class Sealed(_Wrapped):
        __tensor_flatten__: Any = property(lambda self: getattr(self, "no such"))

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sealed = Sealed(*_in_eight_bits(torch.randn(WIDTH, WIDTH).to(device)))
            self.sealed = nn.Parameter(sealed, requires_grad=False)
            self.plain, self.lazy = nn.Linear(WIDTH, WIDTH, device=device), nn.LazyLinear(WIDTH, device=device)

        def forward(self, x: Tensor) -> Tensor:
            return self.lazy(self.plain(F.linear(x, self.sealed)))

    def program(device: torch.device) -> Sequence[Tensor]:
        torch.manual_seed(0)
        model = Layers()
        first = model(batch(device, 9)).detach()
        return [first, *_train(model, device, 4, lambda _: ())]

    assert_same_streamed(program, device)
    assert not [*weights.plain_tensors([Layers().sealed])]


if __name__ == "__main__":
    main("quantized")
