"""The ``nvme`` tier of a session: its store, and the direct way to it where the drives have one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.host.ledger import Account
from torch_tiers.allocator.host.room import Room
from torch_tiers.allocator.nvme import cufile
from torch_tiers.allocator.nvme.choose import Opener, choose_backends, gpu_in_use
from torch_tiers.allocator.nvme.decide import Decision
from torch_tiers.allocator.nvme.ring import Ring
from torch_tiers.allocator.nvme.store import NvmeStore
from torch_tiers.allocator.nvme.ways import SLOT_BYTES, SLOTS
from torch_tiers.config import NvmeConfig
from torch_tiers.launcher import processes
from torch_tiers.migrator.offload.direct import DirectWay
from torch_tiers.spoken import say
from torch_tiers.topology import filesystem_of
from torch_tiers.topology.wear import wear_of

log = logging.getLogger("tiers")


class Drives:
    """The directories of a session.

    Parameters
    ----------
    config
        What the user asked for.
    capacity, step, account, rooms
        As `NvmeStore` takes them.
    cache
        The directory that keeps what was measured of each way to the drives.
    on_gpu
        Whether it is a GPU's memory that goes there.
    """

    def __init__(
        self,
        config: NvmeConfig,
        capacity: int,
        *,
        step: int,
        account: Account | None,
        rooms: Mapping[Path, Callable[[], Room]],
        cache: Path | None,
        on_gpu: bool,
    ) -> None:
        self._gds = config.gds
        self._paths = config.paths
        opener: Opener | None = None
        if on_gpu and config.gds != "off":
            opener = choose_backends(config.paths, config.gds, cache, gpu_in_use())
        self.store = NvmeStore(
            config.paths,
            capacity,
            gds=config.gds,
            checksum=config.checksum,
            step=step,
            backend=opener,
            account=account,
            rooms=rooms,
        )
        self._decision = None if opener is None else opener.decision  # by now it has opened the files
        # With TIERS_LOG=info each directory's way has been told, with its speeds.
        why = None if self._decision is None else self._decision.obstacle
        if why is not None and not log.isEnabledFor(logging.INFO):
            say(f"nvme goes through host memory: {why}")

    def worn(self) -> dict[str, Any]:
        """For `stats.json`, how worn the drives below the directories are, as far as they tell. It may take seconds.

        With their number, and that of the processes on this host, which write as much.
        """
        drives = {drive.name for path in self._paths if (drive := filesystem_of(path).drive) is not None}
        told = {name: found._asdict() for name, found in wear_of(sorted(drives)).items()}
        return {"drives": len(drives), "processes": processes("LOCAL_WORLD_SIZE"), "told": told}

    def direct_way(self, device: torch.device) -> DirectWay | None:
        """The way from a GPU's memory past the host's, where all directories have one.

        Raises
        ------
        TiersError
            If the GPU has no memory that can be registered, and ``nvme.gds`` is ``"require"``.
        """
        if self._decision is None or not (self._decision.direct and self.store.takes_device_memory):
            return None
        rings: list[Ring] = []
        try:
            while len(rings) < 2:
                rings.append(Ring(device, SLOTS, SLOT_BYTES, cufile.register, cufile.deregister))
        except TiersError as error:
            for ring in rings:
                ring.close()
            if self._gds == "require":
                raise
            log.warning("nvme goes through host memory: %s", error)
            return None
        write, read = rates(self._decision)
        return DirectWay(self.store, rings[0], rings[1], write, read)


def rates(decision: Decision) -> tuple[float, float]:
    """Bytes per second that all directories take and give together; 0 if that is not known of one.

    A store gives each as much as it writes and reads in the same time.
    """
    choices = [each.choice for each in decision.directories.values()]
    speeds = [(choice.write or 0.0, choice.read or 0.0) for choice in choices]
    if not speeds or not all(write and read for write, read in speeds):
        return 0.0, 0.0
    combined = [1 / (1 / write + 1 / read) for write, read in speeds]
    shares = [rate / sum(combined) for rate in combined]
    write, read = (min(speed[way] / share for speed, share in zip(speeds, shares, strict=True)) for way in (0, 1))
    return write, read
