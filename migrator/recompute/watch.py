"""Whether a module's forward changes what a second one, in backward, would find changed, or change again.

`regions` gives modules back the numbers, names and tensors among their attributes. What it cannot undo is looked for
here: other attributes, global and captured names that are set anew; tensors, arrays, containers and generators that
are changed in place; random numbers of Python and NumPy, and of GPUs that the checkpoint does not know of; and what
other ranks take part in. All that a forward can reach by its modules' attributes, and by the globals and captured
variables of the functions that they and their classes have, is compared before and after, and once more when backward
begins. That is not all that a forward can do: a file that it opens and writes to is not seen.
"""

from __future__ import annotations

import logging
import operator
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

SETTINGS = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device))
"""Kinds of values that cannot be changed in place, and hold nothing."""

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Names of the attributes that every module has."""

_NORMALISATIONS = (_BatchNorm.forward, _InstanceNorm.forward, nn.SyncBatchNorm.forward)
_SUMMED = (torch.float32, torch.bfloat16, torch.float16)
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
CONTAINERS = (dict, list, set, deque)
_LIMIT = 1000  # things in a container up to which each is looked at
_LARGE = 1 << 20  # bytes of an array beyond which it is not
ABSENT = object()
_Look = tuple[Callable[[], Any], Any]  # what to see, and what was seen
Sums = tuple[dict[torch.device, Tensor], dict[torch.device, Tensor]]


class Watch:
    """What the forward of a module could change, as it is now; `tensors` are those that it is given."""

    def __init__(self, module: nn.Module, tensors: Iterable[Tensor] = ()) -> None:
        self._seen: set[int] = set()
        self._own = {id(child) for child in module.modules()}
        self._kept: list[object] = []  # an id is good for as long as the object lives
        self._looks: list[_Look] = []
        self._tensors = list(_own_tensors(module))
        self._sums = _sums(self._tensors), dict[torch.device, Tensor]()  # before forward, and after it
        self._drawn: list[_Look] = []  # random numbers, and what all ranks must call alike
        self._look(random.getstate, self._drawn)
        self._look(lambda: pickle.dumps(np.random.get_state()), self._drawn)
        self._look(_collectives, self._drawn)
        devices = {tensor.device for tensor in tensors}
        self._look_at_all(drawn for drawn in torch.cuda.default_generators if drawn.device not in devices)
        self.look_at_given(tensors)
        for child in module.modules():
            self._look(partial(_attributes, child))
            self._look_at_all(_attributes(child))
            for parameter in vars(child)["_parameters"].values():
                if parameter is not None and not parameter.is_inference():
                    self._look(partial(getattr, parameter, "_version"))
            for function in functions_of(type(child)):
                self._look_at(function)
            for base in type(child).__mro__:
                self._look_at_class(base)

    def look_at_given(self, tensors: Iterable[Tensor]) -> None:
        """Look at tensors that forward is given, too, and hold none of their memory, which the program may give up."""
        for tensor in tensors:
            if not tensor.is_inference():  # of those nobody counts the versions
                self._look(partial(getattr, _without_memory(tensor), "_version"))

    def forward_over(self) -> bool:
        """Whether forward, which is over, has drawn nothing and left all of it as it was."""
        drawn, self._drawn = self._drawn, []
        self._sums = self._sums[0], _sums(self._tensors)
        return _are_same(drawn) and self.unchanged()

    @property
    def sums(self) -> Sums:
        """Of what the module owns before and after its forward, for `same_sums`: now it would wait for the device."""
        return self._sums

    def unchanged(self) -> bool:
        """Whether all of it is what it was, but for what the program has drawn since."""
        return _are_same(self._looks)

    def _look(self, look: Callable[[], Any], among: list[_Look] | None = None) -> None:
        (self._looks if among is None else among).append((look, look()))

    def _look_at_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self._look_at(value)

    def _look_at(self, value: Any, depth: int = 2) -> None:
        """Look at what can be changed of a value without giving it another name."""
        kind = type(value)  # not what the value itself says: it may be a proxy
        if id(value) in self._seen or kind in SETTINGS or issubclass(kind, (ModuleType, logging.Logger)):
            return
        if issubclass(kind, type):
            self._look_at_class(value)
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if issubclass(kind, nn.Module):
            if id(value) not in self._own:
                self._look_at_hidden(value)
        elif issubclass(kind, Tensor):
            self.look_at_given([value])
        elif issubclass(kind, torch.Generator):
            self._look(lambda: value.get_state().numpy().tobytes(), self._drawn)
        elif issubclass(kind, CONTAINERS):
            self._look(lambda: _things(value))
            things = _things(value)
            if depth and isinstance(things, list):
                for thing in things:
                    self._look_at(thing, depth - 1)
        elif issubclass(kind, tuple):
            if depth:
                for thing in tuple.__iter__(value):
                    self._look_at(thing, depth - 1)
        elif issubclass(kind, partial):
            self._look_at_all((value.func, *value.args, *value.keywords.values()))
        elif issubclass(kind, MethodType):
            self._look_at(value.__func__)
        elif issubclass(kind, FunctionType):
            self._look_through(value)
        elif issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom):
            self._look(value.getstate, self._drawn)
        elif issubclass(kind, np.random.Generator):
            self._look(lambda: pickle.dumps(value.bit_generator.state), self._drawn)
        elif issubclass(kind, np.random.RandomState):
            self._look(lambda: pickle.dumps(value.get_state(legacy=False)), self._drawn)
        elif issubclass(kind, np.ndarray):
            if value.nbytes <= _LARGE:
                self._look(lambda: pickle.dumps(value))
        elif issubclass(kind, random.SystemRandom) or hasattr(kind, "__next__"):
            self._look(object, self._drawn)  # where it stands cannot be seen: never the same
        elif depth:
            with suppress(AttributeError):
                self._look_at(object.__getattribute__(value, "__dict__"), depth - 1)

    def _look_at_hidden(self, module: nn.Module) -> None:
        """Look at a module that forward reaches, and that is not among those within: in a plain list, or a global."""
        for child in module.modules():
            self._look(partial(_attributes, child))
            held = vars(child)
            self.look_at_given(t for name in ("_parameters", "_buffers") for t in held[name].values() if t is not None)

    def _look_at_class(self, kind: type) -> None:
        """Look at what a class of the program's keeps for all of its instances."""
        if id(kind) in self._seen or is_torch(kind.__module__):
            return
        self._seen.add(id(kind))
        self._look(partial(_shared, kind))
        for value in _shared(kind):
            self._look_at(value, 1)

    def _look_through(self, function: FunctionType) -> None:
        """Look at what a function can reach by name."""
        if is_torch(function.__module__ or ""):
            return
        for cell in function.__closure__ or ():
            self._look(partial(contents_of, cell))
            self._look_at(contents_of(cell))
        there = function.__globals__
        for name in names_in(function.__code__):
            if name in there:
                self._look(partial(there.get, name, ABSENT))
                self._look_at(there[name])


def _attributes(module: nn.Module) -> list[Any]:
    """The program's attributes that are more than settings; and the buffers."""
    own = vars(module)
    others = [value for name, value in own.items() if name not in OF_EVERY_MODULE and type(value) not in SETTINGS]
    return others if keeps_statistics(module) else [*others, *own["_buffers"].values()]


def _shared(kind: type) -> list[Any]:
    """What a class has besides what it does."""
    return [
        value
        for name, value in list(vars(kind).items())
        if not name.startswith(("__", "_abc_")) and not (callable(value) or hasattr(type(value), "__get__"))
    ]


def keeps_statistics(module: nn.Module) -> bool:
    """Whether it changes its buffers as PyTorch's normalisations do, in training without looking at them."""
    return type(module).forward in _NORMALISATIONS


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers that forward may not change."""
    for child in module.modules():
        own = vars(child)
        held = [*own["_parameters"].values(), *(() if keeps_statistics(child) else own["_buffers"].values())]
        for tensor in held:
            if type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.numel():
                yield tensor


def _sums(tensors: Iterable[Tensor]) -> dict[torch.device, Tensor]:
    """What tells that one of them was changed, by device, once the device has it: versions do not count `.data`.

    The sum of its bits; of parameters that are trained the sum of absolute values, which takes one call for all of a
    kind, where hundreds of calls a module would make the host late. That may miss a change of one value in millions.
    """
    sums: dict[torch.device, list[Tensor]] = {}
    trained: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    with torch.no_grad():
        for tensor in tensors:
            if tensor.device.type == "meta" or not tensor.untyped_storage().nbytes():
                continue
            if tensor.requires_grad and tensor.dtype in _SUMMED:
                trained.setdefault((tensor.device, tensor.dtype), []).append(tensor)
            else:
                sums.setdefault(tensor.device, []).append(
                    _flat(tensor.detach()).sum(0, keepdim=True, dtype=torch.int64)
                )
        for (device, _), of in trained.items():
            norms = torch.stack(torch._foreach_norm(of, 1, dtype=torch.float32))
            sums.setdefault(device, []).append(norms.view(torch.int32).long())
        return {device: torch.cat(of) for device, of in sums.items()}


def _flat(tensor: Tensor) -> Tensor:
    """All of its bits, as integers; without a copy where it is dense."""
    if not tensor.is_contiguous():
        dense = tensor.dim() in (4, 5) and tensor.is_contiguous(memory_format=_CHANNELS_LAST[tensor.dim()])
        tensor = tensor.as_strided((tensor.numel(),), (1,)) if dense else tensor.contiguous()
    return tensor.reshape(-1).view(torch.int32 if tensor.nbytes % 4 == 0 else torch.uint8)


def same_sums(sums: Sums) -> bool:
    """Whether forward has left what its module owns as it was, as far as a sum of bits tells. Waits for the device."""
    before, after = sums
    return before.keys() == after.keys() and all(torch.equal(before[device], after[device]) for device in before)


def contents_of(cell: Any) -> Any:
    """What a captured variable holds."""
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return ABSENT


def _without_memory(tensor: Tensor) -> Tensor:
    """A tensor with the same version counter; of a kind that this is not known of, the tensor itself."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return tensor
    alias = tensor.detach()
    alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias


def _collectives() -> Any:
    """How many collective operations each group of ranks has begun: the others would wait for what one repeats."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    try:
        return tuple(group._get_sequence_number_for_group() for group in groups)
    except RuntimeError:
        return object()  # not every backend counts


def _things(container: Any) -> Any:
    # Not by methods of the program's: there are dictionaries that load what they are asked for.
    kind: Any = next(kind for kind in CONTAINERS if isinstance(container, kind))
    if kind.__len__(container) > _LIMIT:
        return kind.__len__(container)
    return [*kind.__iter__(container), *(dict.values(container) if kind is dict else ())]


def _are_same(looks: Iterable[_Look]) -> bool:
    try:
        return all(_is_same(look(), before) for look, before in looks)
    except Exception:  # what cannot be looked at any more is not what it was
        return False


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, list):  # of things of which some may be tensors
        return len(one) == len(other) and all(map(operator.is_, one, other))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return isinstance(one, (int, bytes)) and one == other


def is_torch(module: str) -> bool:
    """Whether a module is PyTorch's, Python's own or ours."""
    return module.partition(".")[0] in ("torch", "torch_tiers", "builtins")


def functions_of(kind: type) -> Iterator[FunctionType]:
    """The functions that a module's class brings along, besides PyTorch's own."""
    for base in kind.__mro__:
        if not is_torch(base.__module__):
            for value in vars(base).values():
                function = getattr(value, "__func__", value)
                if isinstance(function, FunctionType):
                    yield function


@cache
def names_in(code: CodeType) -> frozenset[str]:
    """The names that code and the functions within it use."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(code.co_names).union(*inner)
