from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch_tiers.migrator.recording.operands import Operands


class Group:
    """Counts how often somebody looks whether it is resident."""

    looks = 0

    def __init__(self) -> None:
        self.bytes = 8

    @property
    def counted(self) -> int:
        Group.looks += 1
        return self.bytes


def operand(ident: int, group: Group) -> Any:
    return SimpleNamespace(ident=ident, saved=SimpleNamespace(group=group))


def test_what_is_asked_for_while_its_group_stays_is_in_use_until_the_last_is_asked_for() -> None:
    operands, group, over = Operands(1), Group(), Group()
    first, second, last = operand(1, group), operand(2, over), operand(3, group)
    operands.ask(first, 10)
    operands.ask(second, 11)
    over.bytes = 0
    operands.ask(None, 12)
    operands.ask(last, 13)
    assert operands.beside() == [(first, 10, 13)]


def test_thousands_of_tensors_are_looked_at_in_time_that_grows_with_their_number() -> None:
    """A function that saves 2,000 took 23 s, as each question went through all before it."""
    operands, count = Operands(1), 2000
    for ident in range(count):
        group = Group()
        operands.ask(operand(ident, group), ident)
        group.bytes = 0  # it was alone there
    assert operands.beside() == []
    assert Group.looks < 3 * count
