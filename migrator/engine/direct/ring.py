"""What the direct way asks of a ring of staging slots."""

from __future__ import annotations

from typing import Protocol

import torch


class Ring(Protocol):
    """Staging slots: flat uint8 tensors of one size on the device."""

    @property
    def slots(self) -> int:
        """How many there are."""

    @property
    def slot_bytes(self) -> int:
        """Size of each; whole 4 KiB."""

    @property
    def nbytes_total(self) -> int:
        """Bytes that it takes of the device."""

    def take(self) -> torch.Tensor:
        """Take a slot; blocks while all are taken."""

    def give(self, slot: torch.Tensor) -> None:
        """Give a slot back, which nothing uses any more."""

    def close(self) -> None:
        """Free the slots. Idempotent."""
