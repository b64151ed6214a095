"""What is read of the machine and of a directory, from trees that the tests build."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.ways_fakes import MACHINE, UUID
from torch_tiers.allocator.nvme import facts
from torch_tiers.allocator.nvme.facts import Gpu, nvidia_fs_loaded, read_machine, read_place
from torch_tiers.allocator.sizes import GiB

GPUS = "proc/driver/nvidia/gpus"
PCI = "sys/bus/pci/devices/0000:1b:00.0"
TREE = {
    f"{GPUS}/0000:1b:00.0/information": f"Model: \t\t NVIDIA H100 80GB HBM3\nGPU UUID: \t GPU-{UUID}\nBus Type: PCIe",
    # BAR0 of 16 MiB, BAR1 of 128 GiB, which is region 2 of this GPU, and the ROM behind the six regions
    f"{PCI}/resource": (
        "0x00000000d0000000 0x00000000d0ffffff 0x14220c\n"
        "0x0000000000000000 0x0000000000000000 0x0\n"
        "0x0000200000000000 0x0000201fffffffff 0x14220c\n" + "0x0 0x0 0x0\n" * 3 + "0x0 0xffffffffffffffff 0x1\n"
    ),
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build",
    "proc/driver/nvidia/params": 'ResmanDebugLevel: 4294967295\nRegistryDwords: "RMForceStaticBar1=1;"',
    "proc/sys/kernel/osrelease": "6.8.0-45-generic",
    "proc/version": "Linux version 6.8.0-45-generic",
    "proc/modules": "nvidia 1 0 - Live 0x0\nnvidia_fs 1 0 - Live 0x0",
    "proc/kallsyms": "0 t pci_p2pdma_map\n0000000000000000 d p2pdma_pgmap_ops",
    "sys/module/nvme_core/parameters/multipath": "N",
    "run/udev/data/x": "",
}


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


def machine(root: Path, **environ: str) -> facts.Machine:
    return read_machine(UUID, root=root, environ=environ, kvikio=lambda: "26.10.0", cufile=lambda: True)


def test_a_machine_of_both_ways_is_read(tmp_path: Path) -> None:
    found = machine(tree(tmp_path, TREE))
    assert found == MACHINE


def test_a_machine_of_which_nothing_can_be_read_has_nothing(tmp_path: Path) -> None:
    found = machine(tmp_path)
    assert (found.gpu, found.kernel, found.driver, found.p2pdma) == (None, "", None, None)
    assert not (found.open_modules or found.nvidia_fs or found.udev or found.wsl or found.multipath)
    assert found.static_bar1 == (platform.machine() != "x86_64")


@pytest.mark.parametrize(
    ("name", "text", "change"),
    [
        ("proc/kallsyms", "0 t something", {"p2pdma": False}),
        ("proc/version", "Linux version 5.15.0-microsoft-standard-WSL2", {"wsl": True}),
        ("sys/module/nvme_core/parameters/multipath", "Y", {"multipath": True}),
        (
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19",
            {"open_modules": False, "driver": "535.129.03"},
        ),
    ],
)
def test_each_fact_is_read_from_its_file(tmp_path: Path, name: str, text: str, change: dict) -> None:
    whole = machine(tree(tmp_path / "whole", TREE))
    assert machine(tree(tmp_path / "other", {**TREE, name: text})) == replace(whole, **change)


def test_nvidia_fs_is_seen_by_its_folder_or_in_the_module_list(tmp_path: Path) -> None:
    assert not nvidia_fs_loaded(tree(tmp_path, {"proc/modules": "nvidia 1 0 - Live 0x0"}))
    assert nvidia_fs_loaded(tree(tmp_path, {"proc/modules": "nvidia_fs 1 0 - Live 0x0"}))
    assert nvidia_fs_loaded(tree(tmp_path / "b", {"proc/driver/nvidia-fs/stats": ""}))


def test_the_gpu_is_that_of_the_program(tmp_path: Path) -> None:
    other = {f"{GPUS}/0000:01:00.0/information": "Model: NVIDIA T4\nGPU UUID: GPU-1"}
    root = tree(tmp_path, {**TREE, **other})
    assert read_machine(f"GPU-{UUID}", root=root).gpu == Gpu(UUID, "NVIDIA H100 80GB HBM3", 128 * GiB)
    assert read_machine("1", root=root).gpu == Gpu("1", "NVIDIA T4", None)  # nothing tells its BAR1
    assert read_machine("2", root=root).gpu is None
    assert read_machine(None, root=root).gpu is None


@pytest.mark.parametrize(
    ("environ", "forced", "off"),
    [
        ({"KVIKIO_COMPAT_MODE": "ON"}, "KVIKIO_COMPAT_MODE", False),
        ({"KVIKIO_COMPAT_MODE": "AUTO"}, None, False),
        ({"CUFILE_FORCE_COMPAT_MODE": "true"}, "CUFILE_FORCE_COMPAT_MODE", False),
        ({"CUFILE_USE_PCIP2PDMA": "false"}, None, True),
        ({"CUFILE_USE_PCIP2PDMA": "1"}, None, False),
    ],
)
def test_the_user_s_word_is_heard(tmp_path: Path, environ: dict, forced: str | None, off: bool) -> None:
    found = machine(tmp_path, **environ)
    assert (found.forced, found.p2pdma_off) == (forced, off)


def test_kallsyms_is_not_read_without_kvikio(tmp_path: Path) -> None:
    assert read_machine(UUID, root=tree(tmp_path, TREE), kvikio=lambda: None).p2pdma is False


def test_a_directory_on_a_partition_and_on_md(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    line = f"36 25 {{}} / {data} rw,noatime shared:1 - ext4 /dev/x rw,data=ordered"
    sys = {
        "sys/devices/pci/nvme/nvme0/nvme0n1/queue/rotational": "0",
        "sys/devices/pci/nvme/nvme0/nvme0n1/nvme0n1p1/dev": "259:1",
        "sys/devices/virtual/block/md0/queue/rotational": "0",
        "sys/devices/virtual/block/md0/md/level": "raid0",
    }
    root = tree(tmp_path / "root", {"proc/self/mountinfo": line.format("259:1"), **sys})
    links = root / "sys/dev/block"
    links.mkdir(parents=True)
    (links / "259:1").symlink_to(root / "sys/devices/pci/nvme/nvme0/nvme0n1/nvme0n1p1")
    (links / "9:0").symlink_to(root / "sys/devices/virtual/block/md0")
    found = read_place(data, root=root)
    assert (found.kind, found.device, found.drive, found.raid) == ("ext4", "259:1", "nvme0n1", None)
    assert found.options == ("data=ordered", "noatime", "rw")
    tree(root, {"proc/self/mountinfo": line.format("9:0")})
    assert (read_place(data, root=root).drive, read_place(data, root=root).raid) == ("md0", "raid0")


def test_a_directory_of_which_nothing_can_be_read_is_no_error(tmp_path: Path) -> None:
    found = read_place(tmp_path / "missing", root=tmp_path)
    assert (found.kind, found.drive, found.direct) == ("an unknown file system", None, False)


def test_the_real_machine_can_be_read(tmp_path: Path) -> None:
    assert read_machine(None).kernel == platform.release()
    assert read_place(tmp_path).kind
    assert list(tmp_path.iterdir()) == []
