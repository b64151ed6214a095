"""The links between the tiers, as plans see them: the bandwidth of each lane, and the costs of moving. Plain data.

The bandwidths are `[links]` in tiers.toml.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

BOUNDLESS = 1 << 62

LANES = ("d2h", "h2d", "disk_write", "disk_read", "gds_write", "gds_read")
"""All there may be: HBM to DRAM and back, DRAM to NVMe and back, HBM to NVMe and back past the host's memory."""

DIRECT = ("gds_write", "gds_read")
"""Those that do not cross the host's memory bus."""

OPPOSITE: Mapping[str, str] = MappingProxyType({"d2h": "h2d", "h2d": "d2h"})
"""Lanes that slow each other down."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The host's costs to execute a plan, in seconds, both ways together.

    Attributes
    ----------
    group : float
        Of a group that is offloaded and prefetched.
    moved : float
        Of a saved tensor in it.
    remade : float
        Of a saved tensor that is recomputed, besides the operators.
    """

    group: float = 40e-6
    moved: float = 30e-6
    remade: float = 30e-6


@dataclass(frozen=True, slots=True)
class Costs:
    """The slowdown of compute by busy lanes.

    As measured on an H100: a lane that was busy throughout made a GPT's step of 265 ms 2.1% and 1.3% longer. On an H200
    it was less; plans that were made for that instead were 0.2 to 1.4% slower on the H100.

    Attributes
    ----------
    d2h, h2d : float
        By how much compute is slower while that lane is busy.
    """

    d2h: float = 0.021
    h2d: float = 0.013


@dataclass(frozen=True, slots=True)
class Links:
    """The bandwidth of each lane, in bytes per second, for transfers of full size.

    Attributes
    ----------
    d2h, h2d : float
        HBM to DRAM and back, one direction at a time.
    both : float
        The two together when both are busy, in total.
    disk_write, disk_read : float
        DRAM to NVMe and back; 0 if there is no NVMe tier.
    gds_write, gds_read : float
        HBM to NVMe and back past host memory, by GPUDirect Storage; 0 if there is no such path.
    latency : float
        Seconds from requesting a transfer to its first byte.
    usual : Links or None
        The bandwidths while nobody else uses the memory bus; None while nobody does.
    below : int
        Bytes that may move at once to the tiers below HBM.
    dram : int
        Bytes of these that DRAM holds; the rest goes on to NVMe.
    costs : Costs
        The slowdown of compute by busy lanes.
    calls : Calls
        The host's costs to execute a plan.
    """

    d2h: float
    h2d: float
    both: float
    disk_write: float = 0.0
    disk_read: float = 0.0
    gds_write: float = 0.0
    gds_read: float = 0.0
    latency: float = 20e-6
    usual: Links | None = None
    below: int = BOUNDLESS
    dram: int = BOUNDLESS
    costs: Costs = Costs()
    calls: Calls = Calls()

    @property
    def direct(self) -> bool:
        """Return whether groups that a plan assigns to NVMe go there past host memory."""
        return self.gds_write > 0 and self.gds_read > 0

    @property
    def staged(self) -> Links:
        """Return these links without a direct path: all that goes to NVMe passes DRAM."""
        return replace(self, gds_write=0.0, gds_read=0.0)

    def with_direct_way(self, write: float, read: float) -> Links:
        """Return these links with a direct path; a bandwidth that was not measured is that through DRAM."""
        return replace(self, gds_write=write or self.disk_write, gds_read=read or self.disk_read)

    @property
    def has_drive(self) -> bool:
        """Return whether a plan may assign anything to NVMe."""
        return self.direct or self.disk_write > 0

    @property
    def drive(self) -> int:
        """Return the bytes that NVMe holds."""
        return BOUNDLESS if self.below >= BOUNDLESS else max(0, self.below - self.dram)

    def ways(self, tier: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the lanes from HBM to a tier, and those back, in the order in which they are used."""
        if tier != "nvme":
            return ("d2h",), ("h2d",)
        return (DIRECT[:1], DIRECT[1:]) if self.direct else STAGED

    @property
    def contended(self) -> bool:
        """Return whether others need the memory bus: of plans about as fast, one that moves little is preferred."""
        return self.usual is not None

    @property
    def alone(self) -> Links:
        """Return these links as they are while nobody else needs the memory bus."""
        return self if self.usual is None else replace(self.usual, below=self.below, dram=self.dram)

    def scaled(self, parts: Mapping[str, float]) -> Links:
        """Return these links with the bandwidths multiplied by `parts`, also while nobody else needs the memory bus."""
        slower = replace(self, **{lane: getattr(self, lane) * part for lane, part in parts.items()})
        return slower if self.usual is None else replace(slower, usual=self.usual.scaled(parts))

    def with_calls(self, calls: Calls) -> Links:
        """Return these links with other host costs."""
        usual = None if self.usual is None else replace(self.usual, calls=calls)
        return replace(self, calls=calls, usual=usual)

    def without_dram(self, nbytes: int) -> Links:
        """Return these links with so many bytes less of DRAM, in which something else lies."""
        dram, below = (of if of >= BOUNDLESS else max(0, of - nbytes) for of in (self.dram, self.below))
        return replace(self, dram=dram, below=below)

    def reduced(self, left: Mapping[str, float]) -> Links:
        """Return what is left of the links while the memory bus is busy.

        Transfers to drives through DRAM cross that bus, so they are no way out; direct transfers keep their speed.

        Parameters
        ----------
        left : mapping of str to float
            The part that is left of each lane, and of ``bus``; 1 where there is no entry.
        """
        if not left:
            return self
        d2h, h2d = (left.get(lane, left.get("bus", 1.0)) for lane in ("d2h", "h2d"))
        disk = min(left.get("bus", 1.0), d2h, h2d)
        return replace(
            self,
            d2h=self.d2h * d2h,
            h2d=self.h2d * h2d,
            both=self.both * (d2h + h2d) / 2,
            disk_write=self.disk_write * disk,
            disk_read=self.disk_read * disk,
            usual=self.alone,
        )


STAGED = ("d2h", "disk_write"), ("disk_read", "h2d")
"""The way to NVMe through DRAM, and the way back."""


USUAL_CALLS = Calls(group=500e-6, moved=50e-6, remade=60e-6)
"""Until they are measured, as the first plan runs: the medians over sixteen programs of the zoo, on hosts of H200s.

Half of all lay within 467 to 560 us, 37 to 68 and 42 to 104. Where groups are taken to be cheaper than they are, the
plan has to be made once more, a dozen steps later.
"""

PCIE_GEN5 = Links(d2h=55.0e9, h2d=55.1e9, both=92.8e9)
"""Measured on an H100 on PCIe Gen5 x16: what is taken for granted where nobody has measured."""


WORSE = 0.15  # of a lane: with how much less of it plans are made once more
SPARE = 16  # one part in so many of what is below HBM is left out of plans


def links_from(
    measured: Mapping[str, float | None],
    *,
    disk: bool,
    direct: bool = False,
    below: int | None = None,
    dram: int | None = None,
) -> Links:
    """Return links with the measured bandwidths, and defaults for the rest.

    Parameters
    ----------
    measured : mapping of str to float or None
        Bytes per second by the name of the lane; None, or no entry, if it was not measured.
    disk : bool
        Whether there is an NVMe tier.
    direct : bool
        Whether there is a direct path to it, too; if it was not measured, it is as fast as the one through DRAM.
    below : int, optional
        Bytes that the tiers below HBM hold; without it as much as moves.
    dram : int, optional
        Bytes of these that DRAM holds; without it all of them.
    """
    granted = {"d2h": PCIE_GEN5.d2h, "h2d": PCIE_GEN5.h2d}
    if disk:
        granted |= {"disk_write": 2.9e9, "disk_read": 2.9e9}  # one NVMe drive of the same machine
    known: dict[str, Any] = {lane: measured.get(lane) or rate for lane, rate in granted.items()}
    if disk and direct:
        known |= {
            "gds_write": measured.get("gds_write") or known["disk_write"],
            "gds_read": measured.get("gds_read") or known["disk_read"],
        }
    links = replace(PCIE_GEN5, calls=USUAL_CALLS, **known)
    if below is not None:
        links = replace(links, below=usable(below))
    if dram is not None:
        links = replace(links, dram=usable(dram))
    # Both directions together were not measured: the same part of their sum as where they were.
    return replace(links, both=PCIE_GEN5.both * (links.d2h + links.h2d) / (PCIE_GEN5.d2h + PCIE_GEN5.h2d))


def usable(holds: int) -> int:
    """Return the bytes below HBM to plan with: groups lie in whole pages, and the gaps between them are of no use."""
    return holds - holds // SPARE
