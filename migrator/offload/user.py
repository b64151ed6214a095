"""The protocol of an engine that stores groups in a `Backing`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol


class User(Protocol):
    """An engine, as other engines see it."""

    @property
    def lock(self) -> Any:
        """The lock that it holds while it works."""

    @property
    def dead(self) -> Collection[object]:
        """Deaths of groups that it has not noticed yet."""

    def collect(self) -> None:
        """Forget groups that nobody refers to any more; call it with `lock`."""
