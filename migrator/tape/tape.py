"""A tape: the operators of one record, and where generators were, as plain data.

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
from torch_tiers.migrator.tape.operators import Form, Operator, Step, Value

_CALL = struct.Struct("=qIIIIIIBBHI")  # `Packed` of native/tape.cpp
_USE = struct.Struct("=IIi")
_NO_STORAGE = _NO_VERSION = 2**32 - 1


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
    broken : str or None
        Why this is no true record; it is not to be used then.
    """

    thread: int
    broken: str | None
    _recorder: native.Recorder = field(repr=False)
    _record: native.Record = field(repr=False)
    _contents: tuple[Any, ...] = field(repr=False)

    @classmethod
    def read(cls, recorder: native.Recorder, record: native.Record) -> Tape:
        """The tape of a record that is over."""
        contents = recorder.contents(record)
        thread, broken = contents[:2]
        return cls(thread, broken, recorder, record, contents)

    @cached_property
    def operators(self) -> tuple[Operator, ...]:
        """In the order in which they began."""
        return tuple(self._operators())

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """What was called, each once."""
        return tuple(
            Step(number, name, tuple(args), tuple(places), _forms(inputs), _forms(outputs), frozenset(written), *how)
            for number, name, args, places, inputs, outputs, written, *how in self._contents[5]
        )

    @cached_property
    def storages(self) -> tuple[int, ...]:
        """How many bytes each storage has had last."""
        return tuple(memoryview(self._contents[4]).cast("Q"))

    @cached_property
    def draws(self) -> tuple[Draw, ...]:
        """In the operators' order."""
        return tuple(Draw(*parts) for parts in self._contents[6])

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

    def _operators(self) -> Iterator[Operator]:
        steps, uses = self.steps, list(_USE.iter_unpack(self._contents[3]))
        calls = _CALL.iter_unpack(self._contents[2])
        for number, (stream, step, *rest) in enumerate(calls):
            inputs, inputs_count, outputs, outputs_count, thread, waits, raised, *_ = rest
            what = steps[step]
            yield Operator(
                number=number,
                step=what,
                inputs=_all_values(uses[inputs : inputs + inputs_count], what.inputs),
                outputs=_all_values(uses[outputs : outputs + outputs_count], what.outputs),
                thread=thread,
                stream=stream,
                waits=bool(waits),
                raised=bool(raised),
            )


def _all_values(uses: list[tuple[int, int, int]], forms: tuple[Form | None, ...]) -> tuple[Value, ...]:
    return tuple(_value(*use, form) for use, form in zip(uses, forms, strict=True))


def _value(storage: int, version: int, state: int, form: Form | None) -> Value:
    if storage == _NO_STORAGE:
        return Value(None, 0, None, form)
    return Value(storage, state, None if version == _NO_VERSION else version, form)


def _form(parts: tuple[Any, ...] | None) -> Form | None:
    return None if parts is None else Form(*parts)


def _forms(values: list[tuple[Any, ...] | None]) -> tuple[Form | None, ...]:
    return tuple(map(_form, values))
