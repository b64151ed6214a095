"""A tape: the operators of one record, as plain data.

A *value* is a tensor as an operator found it, or left it: a storage, what part of it, and the state that the storage
was in. That state is the number of the operator that wrote it last. Where nothing on the tape did, or somebody wrote
unseen, it is a negative number, another one each time: two values of one storage hold the same bytes if, and only if,
their states are equal. A view is a value of its base's storage, in its base's state.

Nothing here keeps a tensor of the program's, or its memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torch_tiers.migrator.tape import native
from torch_tiers.migrator.tape.closure import Closure, Refused, Stops, closure

_CALL = struct.Struct("=QQqIIIIIIIIIiBBHI")  # `Packed` of native/tape.cpp
_USE = struct.Struct("=IIi")
_NO_STORAGE = _NO_VERSION = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Form:
    """What part of a storage a tensor is.

    Attributes
    ----------
    offset : int or None
        Bytes from its begin; None if the tensor has no strides, as nested ones.
    sizes, strides : tuple of int, or None
        In elements.
    dtype, device
        As the tensor has them.
    bits : int
        1 where it is conjugated, 2 where it is negated, once somebody reads it.
    """

    offset: int | None
    sizes: tuple[int, ...] | None
    strides: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device
    bits: int


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor at one moment.

    Attributes
    ----------
    storage : int or None
        Number of its storage on the tape. None for a tensor that has none that can be told: sparse ones, wrappers of
        subclasses, a number that PyTorch made a tensor of, an undefined one.
    state : int
        The operator that wrote it last; negative if unknown, see above. Where it has no storage, 0.
    version : int or None
        What the tensor's version counter said; None for inference tensors.
    form : Form or None
        None where there is no storage.
    """

    storage: int | None
    state: int
    version: int | None
    form: Form | None

    @property
    def producer(self) -> int | None:
        """The number of the operator that wrote its bytes last; None if that is not known, or before the tape."""
        return self.state if self.storage is not None and self.state >= 0 else None


@dataclass(frozen=True, slots=True)
class Step:
    """What calls of an operator have in common, in one record and in all.

    Attributes
    ----------
    number : int
        Of this step, as long as the process lives.
    name : str
        ``aten::add.Tensor``.
    arguments : tuple
        In the schema's order; None where there is a tensor, or what cannot be kept.
    places : tuple of (int, int)
        For each input value its argument, and its place in a list (-1: it is in none).
    inputs, outputs : tuple of Form or None
        Of the values.
    written : frozenset of int
        Arguments whose bytes the operator changes.
    random, collective : bool
        Whether it may draw random numbers; whether other ranks take part.
    whole : bool
        Whether it can be called again with `arguments` and its values.
    """

    number: int
    name: str
    arguments: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]
    inputs: tuple[Form | None, ...]
    outputs: tuple[Form | None, ...]
    written: frozenset[int]
    random: bool
    collective: bool
    whole: bool


@dataclass(frozen=True, slots=True)
class Operator:
    """One call.

    Attributes
    ----------
    number : int
        Its place on the tape: calls are in the order in which they began.
    step : Step
        What was called.
    inputs, outputs : tuple of Value
        As they were before, and after.
    module : int
        What `Recorder.enter` was given last.
    thread : int
        One number for each thread of the process that ever recorded.
    graph_task : int or None
        The backward that it ran in.
    stream : int
        Of the device that it ran on, as PyTorch numbers them; 0 is the default one.
    waits : bool
        Whether the host waits for the device in it, if it is one that computes by itself.
    raised : bool
        Whether it ended with an exception. Then it has no outputs.
    begun, ran : int
        When it came by, on `time.perf_counter_ns`'s clock, and for how long it ran then, in ns.
    before, after : int
        What of the host's time recording took, before it ran and after, in ns.
    """

    number: int
    step: Step
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    module: int
    thread: int
    graph_task: int | None
    stream: int
    waits: bool
    raised: bool
    begun: int
    ran: int
    before: int
    after: int

    @property
    def name(self) -> str:
        """``aten::add.Tensor``."""
        return self.step.name

    @property
    def in_backward(self) -> bool:
        """Whether it ran in a backward, or in what one recomputes."""
        return self.graph_task is not None

    @property
    def writes(self) -> tuple[Value, ...]:
        """The inputs whose bytes it changed."""
        written = self.step.written
        return tuple(
            value
            for value, (argument, _) in zip(self.inputs, self.step.places, strict=True)
            if argument in written and value.storage is not None
        )


@dataclass(frozen=True, slots=True)
class Save:
    """Autograd saved a value after so many operators: an input of the next one, or an output of the last."""

    position: int
    value: Value


@dataclass(frozen=True, slots=True)
class Mark:
    """Somebody called `Recorder.position` after so many operators, at this time."""

    position: int
    number: int
    when: int


@dataclass(frozen=True, slots=True)
class Draw:
    """Where a generator was when an operator was about to draw from it.

    Attributes
    ----------
    operator : int
        Its number.
    device
        The generator's.
    by_default : bool
        Whether it is the device's own, not one that was passed.
    seed, offset : int
        Of Philox. A generator on the host has no offset, but a state.
    state : bytes or None
        What `torch.Generator.get_state` returns, of one on the host, where it was asked for.
    """

    operator: int
    device: torch.device
    by_default: bool
    seed: int
    offset: int
    state: bytes | None


@dataclass(frozen=True)
class Tape:
    """All that one record ran.

    Attributes
    ----------
    thread : int
        That recorded; see `Operator.thread`.
    began : int
        When, in ns.
    structure : int
        Records that ran the same operators on the same shapes, fed by the same operators, have the same.
    known : int
        Operators that were the same as in the record before.
    broken : str or None
        Why this is no true record; it is not to be used then.
    """

    thread: int
    began: int
    structure: int
    known: int
    broken: str | None
    _recorder: native.Recorder = field(repr=False)
    _record: native.Record = field(repr=False)
    _contents: tuple[Any, ...] = field(repr=False)

    @classmethod
    def read(cls, recorder: native.Recorder, record: native.Record) -> Tape:
        """The tape of a record that is over."""
        contents = recorder.contents(record)
        thread, began, known, structure, broken = contents[:5]
        return cls(thread, began, structure, known, broken, recorder, record, contents)

    @cached_property
    def operators(self) -> tuple[Operator, ...]:
        """In the order in which they began."""
        values = self._values
        return tuple(self._operators(values))

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """What was called, each once."""
        return tuple(_step(*parts) for parts in self._contents[8])

    @cached_property
    def storages(self) -> tuple[int, ...]:
        """How many bytes each storage has had last."""
        return tuple(memoryview(self._contents[7]).cast("Q"))

    @cached_property
    def saves(self) -> tuple[Save, ...]:
        """What autograd saved, in order."""
        return tuple(
            Save(position, _value(_unsigned(storage), _unsigned(version), state, _form(form)))
            for position, storage, version, state, form in self._contents[9]
        )

    @cached_property
    def marks(self) -> tuple[Mark, ...]:
        """In order."""
        return tuple(Mark(*parts) for parts in self._contents[10])

    @cached_property
    def draws(self) -> tuple[Draw, ...]:
        """In the operators' order."""
        return tuple(Draw(*parts) for parts in self._contents[11])

    @property
    def nbytes(self) -> int:
        """Bytes that the record takes, without the objects of Python's that are made of it."""
        return self._recorder.sizes(self._record)[1]

    def find(self, tensor: Tensor) -> tuple[int, int] | None:
        """The storage of a tensor that is alive, and the state that it is in.

        None if it is on no storage that is known, or somebody has written it since: then its bytes are not those that
        the tape knows of.
        """
        found = self._recorder.find(self._record, tensor)
        return None if found is None else (found[0], found[2])

    def closure(
        self, targets: Sequence[Tensor], stops: Stops | None = None, relative: Sequence[tuple[int, int]] = ()
    ) -> Closure | Refused:
        """What makes tensors again that are as this tape left them; see `Recorder.closure`."""
        return closure(self._recorder, self._record, targets, stops, relative)

    def producer(self, tensor: Tensor) -> int | None:
        """The number of the operator that made what is in a tensor; None if that is not known."""
        found = self.find(tensor)
        return None if found is None or found[1] < 0 else found[1]

    def is_alive(self, storage: int) -> bool:
        """Whether the program, or autograd, still has it."""
        return self._recorder.is_alive(self._record, storage)

    @cached_property
    def _values(self) -> list[tuple[int, int, int]]:
        return list(_USE.iter_unpack(self._contents[6]))

    def _operators(self, uses: list[tuple[int, int, int]]) -> Iterator[Operator]:
        steps = self.steps
        calls = _CALL.iter_unpack(self._contents[5])
        for number, (begun, ran, stream, before, after, step, *rest) in enumerate(calls):
            inputs, inputs_count, outputs, outputs_count, module, thread, graph_task, waits, raised, *_ = rest
            what = steps[step]
            yield Operator(
                number=number,
                step=what,
                inputs=_all_values(uses[inputs : inputs + inputs_count], what.inputs),
                outputs=_all_values(uses[outputs : outputs + outputs_count], what.outputs),
                module=module,
                thread=thread,
                graph_task=None if graph_task < 0 else graph_task,
                stream=stream,
                waits=bool(waits),
                raised=bool(raised),
                begun=begun,
                ran=ran,
                before=before,
                after=after,
            )


def _all_values(uses: list[tuple[int, int, int]], forms: tuple[Form | None, ...]) -> tuple[Value, ...]:
    return tuple(_value(*use, form) for use, form in zip(uses, forms, strict=True))


def _value(storage: int, version: int, state: int, form: Form | None) -> Value:
    if storage == _NO_STORAGE:
        return Value(None, 0, None, form)
    return Value(storage, state, None if version == _NO_VERSION else version, form)


def _unsigned(number: int) -> int:
    return number % 2**32


def _form(parts: tuple[Any, ...] | None) -> Form | None:
    return None if parts is None else Form(*parts)


def _step(
    number: int,
    name: str,
    arguments: list[Any],
    places: list[tuple[int, int]],
    inputs: list[tuple[Any, ...] | None],
    outputs: list[tuple[Any, ...] | None],
    written: list[int],
    random: bool,
    collective: bool,
    whole: bool,
) -> Step:
    return Step(
        number,
        name,
        tuple(arguments),
        tuple(places),
        tuple(map(_form, inputs)),
        tuple(map(_form, outputs)),
        frozenset(written),
        random,
        collective,
        whole,
    )
