"""The links between the tiers, as plans see them: how fast each lane is, and what it costs to move. Plain data.

The lanes' speeds are `[links]` in tiers.toml.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

BOUNDLESS = 1 << 62


@dataclass(frozen=True, slots=True)
class Costs:
    """What moving costs besides the links.

    Attributes
    ----------
    host : float
        Seconds that a moved group costs the step, there and back.
    d2h, h2d : float
        By how much compute is slower while that lane is busy.
    """

    host: float = 40e-6
    d2h: float = 0.021
    h2d: float = 0.013


MEASURED = Costs()
"""Measured on an H100: 5 GiB to DRAM made a step of 265 ms 1.3% longer, a lane busy throughout 2.1% and 1.3%."""


HARDLY = Costs(host=4e-6, d2h=0.002, h2d=0.001)
"""Moving hardly costs anything: so it was with a GPT on an H200. Which of the two holds is for a contest to tell."""


@dataclass(frozen=True, slots=True)
class Links:
    """What each lane gives, in bytes per second, for transfers of full size.

    Attributes
    ----------
    d2h, h2d : float
        HBM to DRAM and back, one direction at a time.
    both : float
        The two together when both are busy, in total.
    disk_write, disk_read : float
        DRAM to NVMe and back; 0 where there is no NVMe tier.
    latency : float
        Seconds from asking for a transfer to its first byte.
    usual : Links or None
        What they give while nobody else needs the memory bus; None while nobody does.
    below : int
        Bytes that may move at once to the tiers at their other end.
    dram : int
        Bytes of these that DRAM holds; what is more goes on to NVMe.
    costs : Costs
        What moving costs besides.
    """

    d2h: float
    h2d: float
    both: float
    disk_write: float = 0.0
    disk_read: float = 0.0
    latency: float = 20e-6
    usual: Links | None = None
    below: int = BOUNDLESS
    dram: int = BOUNDLESS
    costs: Costs = MEASURED

    @property
    def contended(self) -> bool:
        """Whether others need the memory bus: of plans about as fast, one that moves little is to be taken."""
        return self.usual is not None

    @property
    def alone(self) -> Links:
        """These links while nobody else needs the memory bus."""
        return self if self.usual is None else replace(self.usual, below=self.below, dram=self.dram)

    def gives_more_than(self, other: Links) -> bool:
        """Whether any lane gives more, by so much that other plans may be worth it."""
        usual = self.usual or self
        lanes = ("d2h", "h2d", "disk_write", "disk_read")
        return any(getattr(self, lane) - getattr(other, lane) > WORSE * getattr(usual, lane) for lane in lanes)

    def scaled(self, parts: Mapping[str, float]) -> Links:
        """Lanes that give a part of what was told, whoever else needs the memory bus."""
        slower = replace(self, **{lane: getattr(self, lane) * part for lane, part in parts.items()})
        return slower if self.usual is None else replace(slower, usual=self.usual.scaled(parts))

    def reduced(self, left: Mapping[str, float], *, direct_disk: bool) -> Links:
        """What is left of the links while the memory bus is busy.

        Parameters
        ----------
        left : mapping of str to float
            The part that is left of each lane, and of ``bus``; 1 where there is no entry.
        direct_disk : bool
            Whether the drives reach HBM without host memory between. Otherwise what goes to them crosses the
            same bus, so it is no way out.
        """
        if not left:
            return self
        d2h, h2d = (left.get(lane, left.get("bus", 1.0)) for lane in ("d2h", "h2d"))
        disk = 1.0 if direct_disk else min(left.get("bus", 1.0), d2h, h2d)
        return replace(
            self,
            d2h=self.d2h * d2h,
            h2d=self.h2d * h2d,
            both=self.both * (d2h + h2d) / 2,
            disk_write=self.disk_write * disk,
            disk_read=self.disk_read * disk,
            usual=self.alone,
        )


PCIE_GEN5 = Links(d2h=55.0e9, h2d=55.1e9, both=92.8e9)
"""Measured on an H100 on PCIe Gen5 x16: what is taken for granted where nobody has measured."""


WORSE = 0.15  # of a lane: with how much less of it plans are made once more
SPARE = 16  # one part in so many of what is below HBM is left out of plans


def links_from(
    measured: Mapping[str, float | None], *, disk: bool, below: int | None = None, dram: int | None = None
) -> Links:
    """The links as far as they were measured, and what is taken for granted for the rest.

    Parameters
    ----------
    measured : mapping of str to float or None
        Bytes per second by the name of the lane; None, or no entry, where it was not measured.
    disk : bool
        Whether there is an NVMe tier.
    below : int, optional
        Bytes that the tiers below HBM hold; without it as much as moves.
    dram : int, optional
        Bytes of these that DRAM holds; without it all of them.
    """
    granted = {"d2h": PCIE_GEN5.d2h, "h2d": PCIE_GEN5.h2d}
    if disk:
        granted |= {"disk_write": 2.9e9, "disk_read": 2.9e9}  # one NVMe drive of the same machine
    known: dict[str, Any] = {lane: measured.get(lane) or rate for lane, rate in granted.items()}
    links = replace(PCIE_GEN5, **known)
    if below is not None:
        links = replace(links, below=usable(below))
    if dram is not None:
        links = replace(links, dram=usable(dram))
    # Both directions together were not measured: the same part of their sum as where they were.
    return replace(links, both=PCIE_GEN5.both * (links.d2h + links.h2d) / (PCIE_GEN5.d2h + PCIE_GEN5.h2d))


def usable(holds: int) -> int:
    """Of what is below HBM the bytes to plan for: groups lie in whole pages, and what is left between is of no use."""
    return holds - holds // SPARE
