"""Makes room in HBM for plans on a device: demotes optimizer state, or streams frozen weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_tiers.migrator.controller.relief import DemotableState
from torch_tiers.migrator.runtime.placed_state import PlacedState
from torch_tiers.migrator.runtime.progress import Progress
from torch_tiers.migrator.runtime.streaming import Streaming


@dataclass(frozen=True, slots=True)
class Reliefs:
    """The relief of each device of a runtime, whose parts these are."""

    state: PlacedState
    streaming: Streaming
    progress: Progress

    def __call__(self, device: torch.device) -> DeviceRelief:
        """Return that of one device."""
        return DeviceRelief(self, device)


@dataclass(frozen=True, slots=True)
class DeviceRelief:
    """See `migrator.controller.relief.Relief`."""

    of: Reliefs
    device: torch.device

    def demotable(self) -> DemotableState | None:
        """Return the state that lies in HBM; None if there is none, or if it would be updated in DRAM."""
        nbytes = self.of.state.demotable_bytes(self.device)
        return DemotableState(nbytes, self.of.progress.iterations_per_step) if nbytes else None

    def demote(self, nbytes: int) -> int:
        """Have so much state demoted when the next forward begins; return how many bytes of it will be."""
        return self.of.state.demote(self.device, nbytes)

    def stream_weights(self, nbytes: int) -> bool:
        """Have frozen weights streamed from the next forward on, as HBM lacks `nbytes`; return whether that helps."""
        return self.of.streaming.relieve(self.device, nbytes)
