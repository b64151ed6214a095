"""What an operator of backward asks for: one operand after the other, before it computes."""

from __future__ import annotations

from typing import TypeAlias

from torch_tiers.migrator.offload.group import Group
from torch_tiers.migrator.recording.storages import Known

Beside: TypeAlias = "tuple[Known, int, int]"
"""An operand, where it was asked for, and where the last one was: until it has that the operator does not compute."""


class Operands:
    """What an operator has asked for so far.

    A group is resident until all in it was asked for, so what was asked for first may be resident while the operator
    computes. It is looked at by group, as these are far fewer.

    Attributes
    ----------
    operator : int
        The operator's number; -1 for none.
    """

    def __init__(self, operator: int) -> None:
        self.operator = operator
        self._asked: dict[int, tuple[Known, Group | None, int]] = {}  # by storage
        self._groups: dict[Group, None] = {}  # that were resident as it asked last, and that of the last
        self._position, self._resident = -1, dict[Group, None]()  # as it asked last, of what it had asked for before

    def ask(self, known: Known | None, position: int) -> None:
        """Take note that it asks for another one; None for what cannot move."""
        resident = {group: None for group in self._groups if group.counted}  # what is not will not be in this operator
        self._position, self._resident, self._groups = position, resident, dict(resident)
        if known is not None:
            group = None if known.saved is None else known.saved.group
            self._asked[known.ident] = known, group, position
            if group is not None:
                self._groups[group] = None

    def beside(self) -> list[Beside]:
        """Return those that were resident as it had asked for all, but for what it asked for last."""
        asked, last = self._asked.values(), self._position
        return [(known, at, last) for known, group, at in asked if at < last and group in self._resident]
