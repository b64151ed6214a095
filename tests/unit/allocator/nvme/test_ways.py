"""Which way GPU memory takes to a drive, and why not another: on facts that no machine stands behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.ways_fakes import EVEN, FAST, MACHINE, PLACE, SLOW
from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.nvme.ways import (
    DIRECT,
    Choice,
    Direct,
    Measured,
    Obstacle,
    Speeds,
    Way,
    choose_all,
    choose_way,
    closed,
    obstacle,
    obstacles,
)
from torch_tiers.allocator.sizes import MiB

GPU = MACHINE.gpu
assert GPU is not None
OPEN: dict[Direct, Obstacle | None] = {"gds": None, "p2pdma": None}
SHUT: dict[Direct, Obstacle | None] = {"gds": Obstacle("no module", "load it"), "p2pdma": Obstacle("old kernel")}


# ------------------------------------------------------------------------------------------ obstacles


def test_both_ways_are_open_where_nothing_speaks_against_them() -> None:
    assert obstacles(MACHINE, PLACE) == OPEN
    assert obstacles(MACHINE) == OPEN


@pytest.mark.parametrize(
    ("spoilt", "reason", "change"),
    [
        ({"gpu": None}, "no CUDA device", ""),
        ({"wsl": True}, "WSL", "Linux itself"),
        ({"kvikio": None}, "kvikio is not installed", "pip install"),
        ({"cufile": False}, "libcufile is not found", "pip install"),
        ({"forced": "KVIKIO_COMPAT_MODE"}, "KVIKIO_COMPAT_MODE forces", "unset KVIKIO_COMPAT_MODE"),
        ({"udev": False}, "/run/udev cannot be read", "--volume /run/udev:/run/udev:ro"),
        ({"gpu": replace(GPU, name="NVIDIA GeForce RTX 4090")}, "GeForce", ""),
        ({"gpu": replace(GPU, bar1=16 * MiB)}, "BAR1 of 16.0 MiB is less than the 128.0 MiB", "resizable BAR"),
    ],
)
@pytest.mark.parametrize("way", DIRECT)
def test_what_the_machine_lacks_closes_both_ways(way: Direct, spoilt: dict, reason: str, change: str) -> None:
    found = obstacle(way, replace(MACHINE, **spoilt), PLACE)
    assert found is not None and reason in found.reason and change in found.change


@pytest.mark.parametrize(
    ("spoilt", "reason", "change"),
    [
        ({"kind": "tmpfs"}, "no direct way to tmpfs", "ext4 or xfs"),
        ({"kind": "overlay"}, "no direct way to overlay", "ext4 or xfs"),
        ({"kind": "nfs4"}, "no direct way to nfs4", "ext4 or xfs"),
        ({"options": ("data=journal",)}, "data=journal", "data=ordered"),
        ({"direct": False}, "O_DIRECT", "ext4 or xfs"),
        ({"drive": "sda"}, "sda is no NVMe drive", "NVMe drive"),
        ({"drive": "dm-0"}, "dm-0 is no NVMe drive", "NVMe drive"),
        ({"drive": None}, "what lies below is no NVMe drive", "NVMe drive"),
        ({"drive": "md0", "raid": "raid5"}, "md raid5", "each drive"),
    ],
)
@pytest.mark.parametrize("way", DIRECT)
def test_what_the_directory_lacks_closes_both_ways(way: Direct, spoilt: dict, reason: str, change: str) -> None:
    found = obstacle(way, MACHINE, replace(PLACE, **spoilt))
    assert found is not None and reason in found.reason and change in found.change


@pytest.mark.parametrize(
    ("spoilt", "reason", "change"),
    [
        ({"kernel": "5.15.0-100-generic"}, "the kernel is 5.15.0-100-generic", "Linux 6.2"),
        ({"kernel": "6.1.0"}, "the kernel is 6.1.0", "Linux 6.2"),
        ({"kernel": ""}, "the kernel is unknown", "Linux 6.2"),
        ({"p2pdma": False}, "has no PCI P2PDMA", "CONFIG_PCI_P2PDMA"),
        ({"p2pdma": None}, "kallsyms does not tell", "readable"),
        ({"open_modules": False}, "not the open ones", "open kernel modules"),
        ({"driver": "560.35.03"}, "the driver is 560.35.03", "565"),
        ({"driver": None}, "the driver is unknown", "565"),
        ({"gpu": replace(GPU, name="NVIDIA RTX A6000")}, "not supported on NVIDIA RTX A6000", ""),
        ({"static_bar1": False}, "does not map all of HBM", "RMForceStaticBar1=1"),
        ({"multipath": True}, "multipath is on", "nvme_core.multipath=N"),
        ({"p2pdma_off": True}, "CUFILE_USE_PCIP2PDMA switches", "unset CUFILE_USE_PCIP2PDMA"),
    ],
)
def test_pci_p2pdma_asks_for_more_than_nvidia_fs(spoilt: dict, reason: str, change: str) -> None:
    machine = replace(MACHINE, **spoilt)
    found = obstacle("p2pdma", machine, PLACE)
    assert found is not None and reason in found.reason and change in found.change
    assert obstacle("gds", machine, PLACE) is None


def test_pci_p2pdma_needs_no_nvidia_fs_and_serves_no_raid() -> None:
    plain = replace(MACHINE, nvidia_fs=False)
    found = obstacle("gds", plain, PLACE)
    assert found == Obstacle("the kernel module nvidia-fs is not loaded", "load it: modprobe nvidia-fs")
    assert obstacle("p2pdma", plain, PLACE) is None
    striped = replace(PLACE, drive="md0", raid="raid0")
    assert obstacle("gds", MACHINE, striped) is None
    assert "md raid0" in str(obstacle("p2pdma", MACHINE, striped))


def test_both_reasons_are_told_where_they_differ() -> None:
    assert closed(OPEN) is None
    assert closed({"gds": SHUT["gds"], "p2pdma": None}) is None
    assert closed(SHUT) == Obstacle("no module, and without it old kernel", "load it")
    assert closed({"gds": Obstacle("WSL"), "p2pdma": Obstacle("WSL")}) == Obstacle("WSL")


# -------------------------------------------------------------------------------------------- choices


@pytest.mark.parametrize(
    ("measured", "way"),
    [
        ({"host": EVEN, "gds": FAST, "p2pdma": EVEN}, "gds"),
        ({"host": EVEN, "gds": EVEN, "p2pdma": FAST}, "p2pdma"),
        ({"host": EVEN, "gds": EVEN, "p2pdma": EVEN}, "gds"),
        ({"host": EVEN, "gds": Speeds(9.5e9, 9.5e9, 9.5e9), "p2pdma": SLOW}, "gds"),  # it spares host memory
        ({"host": EVEN, "gds": SLOW, "p2pdma": SLOW}, "host"),
        ({"host": EVEN, "gds": "hung", "p2pdma": FAST}, "p2pdma"),
        ({"host": EVEN, "gds": "hung", "p2pdma": "died"}, "host"),
        ({"host": "died", "gds": SLOW, "p2pdma": "died"}, "gds"),
        ({}, "host"),
    ],
)
def test_a_direct_way_wins_with_95_percent_of_the_speed(measured: dict[Way, Measured], way: Way) -> None:
    assert choose_way(OPEN, measured, "prefer").way == way


def test_a_choice_tells_the_speeds_of_its_way_and_why_it_is_not_direct() -> None:
    fast = choose_way(OPEN, {"host": EVEN, "gds": Speeds(11e9, 12e9, 13e9)}, "prefer")
    assert fast == Choice("gds", 11e9, 12e9, None)
    slow = choose_way(OPEN, {"host": EVEN, "gds": SLOW}, "prefer")
    assert (slow.write, slow.why_not) == (
        EVEN.write,
        "gds moves 9.4 GB/s both ways at once, host memory 10.0 GB/s",
    )
    assert choose_way(SHUT, {}, "prefer") == Choice("host", None, None, str(closed(SHUT).reason), "load it")
    assert choose_way(OPEN, {"host": EVEN, "gds": "it hung", "p2pdma": "it died"}, "prefer").why_not == "it died"


def test_off_is_by_way_of_the_host() -> None:
    assert choose_way(OPEN, {"host": EVEN, "gds": FAST}, "off").way == "host"


def test_require_takes_a_slow_direct_way_and_raises_without_one() -> None:
    assert choose_way(OPEN, {"host": EVEN, "gds": SLOW}, "require").way == "gds"
    assert choose_way(OPEN, {}, "require").way == "gds"
    with pytest.raises(TiersError, match=r"no module, and without it old kernel\); load it"):
        choose_way(SHUT, {}, "require")
    with pytest.raises(TiersError, match="it hung"):
        choose_way({"gds": None, "p2pdma": Obstacle("old kernel")}, {"host": EVEN, "gds": "it hung"}, "require")


def test_all_directories_of_a_store_go_straight_or_none() -> None:
    a, b = Path("/a"), Path("/b")
    fast: dict[Way, Measured] = {"host": EVEN, "gds": FAST, "p2pdma": SLOW}
    assert {choice.way for choice in choose_all({a: (OPEN, fast), b: (OPEN, fast)}, "prefer").values()} == {"gds"}
    for odd in (SHUT, {}), (OPEN, {"host": EVEN, "gds": "it hung", "p2pdma": "it hung"}):
        chosen = choose_all({a: (OPEN, fast), b: odd}, "prefer")
        assert {choice.way for choice in chosen.values()} == {"host"}
        assert "all directories must, and /b does not: " in (chosen[a].why_not or "")
        assert "all directories" not in (chosen[b].why_not or "")
    with pytest.raises(TiersError, match=r"nvme at /b: .*no module"):
        choose_all({a: (OPEN, fast), b: (SHUT, {})}, "require")


def test_a_store_has_one_direct_way() -> None:
    a, b = Path("/a"), Path("/b")
    by_gds: dict[Way, Measured] = {"host": EVEN, "gds": FAST, "p2pdma": EVEN}
    by_p2pdma: dict[Way, Measured] = {"host": EVEN, "gds": EVEN, "p2pdma": FAST}
    chosen = choose_all({a: (OPEN, by_gds), b: (OPEN, by_p2pdma)}, "prefer")
    assert {choice.way for choice in chosen.values()} == {"gds"}
