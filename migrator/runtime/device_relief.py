"""What gives way on a device where plans are the faster for more room: optimizer state, or frozen weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_tiers.migrator.controller.relief import StateOffer
from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.runtime.placed_state import PlacedState
from torch_tiers.migrator.runtime.progress import Progress
from torch_tiers.migrator.runtime.streaming import Streaming


@dataclass(frozen=True, slots=True)
class Reliefs:
    """The relief of each device, as `Relief` has it."""

    state: PlacedState
    streaming: Streaming
    progress: Progress

    def __call__(self, device: torch.device, links: Links) -> DeviceRelief:
        """Return that of one device with these links."""
        return DeviceRelief(self, device, links)


@dataclass(frozen=True, slots=True)
class DeviceRelief:
    """That of one device."""

    of: Reliefs
    device: torch.device
    links: Links

    def offer(self) -> StateOffer | None:
        """Return the state in HBM; None if there is none, or some was asked to give way already.

        For each step it comes and goes at the same time.
        """
        nbytes = self.of.state.may_give_way(self.device)
        return StateOffer(nbytes, 2 / self.links.both / self.of.progress.iterations_of_step) if nbytes else None

    def give_way(self, nbytes: int) -> int:
        """Have state demoted when the next forward begins."""
        return self.of.state.give_way(self.device, nbytes)

    def stream_weights(self, nbytes: int) -> bool:
        """Have frozen weights streamed from the next forward on, if that helps."""
        return self.of.streaming.relieve(self.device, nbytes)
