"""Facts about the machine, read from trees that the tests build."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torch_tiers.topology import default_dram_capacity, discover, memory_left
from torch_tiers.topology.gpu import Gpu, find_gpus, numa_node
from torch_tiers.topology.memory import (
    CgroupMemory,
    Memory,
    cgroup_memory,
    cores_available,
    cores_of_rank,
    numa_nodes,
    parse_cores,
    read_memory,
)
from torch_tiers.topology.storage import filesystem_of

GiB = 1024**3


def tree(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


def test_the_real_machine_can_be_read():
    found = discover()
    assert 0 < found.memory.available <= found.memory.total
    assert 1 <= found.cores <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("files", "part"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "50000 100000"}, 0.5),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/b/cpu.max": "50000 100000",
                "sys/fs/cgroup/a/cpu.max": "20000 100000",
            },
            0.2,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/a\n5:memory:/a",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "70000",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
            },
            0.7,
        ),
        ({"proc/self/cgroup": "4:cpu,cpuacct:/a", "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1"}, None),
    ],
)
def test_a_container_may_have_less_time_than_it_sees_cores(tmp_path, files, part):
    assert cores_of_rank(1, tree(tmp_path, files)) == (cores_available() if part is None else part)


def test_each_rank_has_its_part_of_the_machine_or_the_cores_that_it_was_given(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    for visible, part in ((128, 16), (16, 16), (4, 4)):  # all, those of its own NUMA node, fewer
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, visible=visible: set(range(visible)))
        assert cores_of_rank(8, tmp_path) == part
    quota = tree(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "3200000 100000"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(128)))
    assert cores_of_rank(8, quota) == 4


def test_meminfo_is_in_bytes(tmp_path):
    root = tree(tmp_path, {"proc/meminfo": "MemTotal: 16 kB\nMemAvailable: 8 kB\nHugePages_Total: 3"})
    memory = read_memory(root)
    assert (memory.total, memory.available, memory.cgroup) == (16384, 8192, None)


def test_no_cgroup_file_is_no_limit(tmp_path):
    assert cgroup_memory(tmp_path) is None


def test_version_2_counts_the_level_with_the_least_room(tmp_path):
    top = "sys/fs/cgroup"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/step",
            f"{top}/job/memory.max": 10 * GiB,
            f"{top}/job/memory.current": 9 * GiB,
            f"{top}/job/step/memory.max": 4 * GiB,
            f"{top}/job/step/memory.current": 1 * GiB,
        },
    )
    found = cgroup_memory(root)
    assert found == CgroupMemory(root / top / "job", 10 * GiB, 9 * GiB)
    assert found.room == 1 * GiB


def test_a_level_without_a_limit_is_passed_over(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job",
            "sys/fs/cgroup/job/memory.max": "max",
            "sys/fs/cgroup/memory.max": 2 * GiB,
            "sys/fs/cgroup/memory.current": 0,
        },
    )
    assert cgroup_memory(root) == CgroupMemory(root / "sys/fs/cgroup", 2 * GiB, 0)


def test_where_the_kernel_slows_everybody_down_is_a_limit_as_well(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": 4 * GiB,
            "sys/fs/cgroup/memory.high": 3 * GiB,
            "sys/fs/cgroup/memory.current": GiB,
        },
    )
    assert cgroup_memory(root) == CgroupMemory(root / "sys/fs/cgroup", 3 * GiB, GiB)


VERSION_2 = ("0::/", "sys/fs/cgroup", "memory.max", "memory.current", "{}", "file_{}")
VERSION_1 = (
    "4:memory:/",
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_{}",
    "total_{}",
)


@pytest.mark.parametrize(("listing", "top", "limit", "usage", "cache", "unwritten"), [VERSION_2, VERSION_1])
@pytest.mark.parametrize(
    ("stat", "used"),
    [
        ({"inactive_file": 2 * GiB}, 5 * GiB),
        ({"inactive_file": GiB, "active_file": 4 * GiB}, 2 * GiB),  # data files that were read twice
        ({"active_file": 4 * GiB, "dirty": GiB, "writeback": GiB}, 5 * GiB),
        ({"active_file": GiB, "dirty": 2 * GiB}, 7 * GiB),  # read at different moments
    ],
)
def test_file_cache_that_can_be_dropped_at_once_is_not_usage(
    tmp_path, listing, top, limit, usage, cache, unwritten, stat, used
):
    names = {name: (cache if name.endswith("file") else unwritten).format(name) for name in stat}
    lines = ["anon 5", "active_files 7", *(f"{names[name]} {nbytes}" for name, nbytes in stat.items())]
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": listing,
            f"{top}/{limit}": 8 * GiB,
            f"{top}/{usage}": 7 * GiB,
            f"{top}/memory.stat": "\n".join(lines),
        },
    )
    assert cgroup_memory(root).usage == used


def test_version_1_is_read_where_the_container_shows_it(tmp_path):
    # The listed path is the host's; below the mount point only the container's own level exists.
    top = "sys/fs/cgroup/memory"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu:/docker/abc\n4:memory:/docker/abc\n0::/",
            f"{top}/memory.limit_in_bytes": 3 * GiB,
            f"{top}/memory.usage_in_bytes": 1 * GiB,
        },
    )
    assert cgroup_memory(root) == CgroupMemory(root / top, 3 * GiB, 1 * GiB)


def test_version_1_writes_no_limit_as_a_huge_number(tmp_path):
    top = "sys/fs/cgroup/memory"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/",
            f"{top}/memory.limit_in_bytes": 2**63 - 4096,
            f"{top}/memory.usage_in_bytes": 0,
        },
    )
    assert cgroup_memory(root) is None


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        (None, 8 * GiB),
        (CgroupMemory(Path("/"), 10 * GiB, 2 * GiB), 4 * GiB),
        (CgroupMemory(Path("/"), 100 * GiB, 0), 8 * GiB),
        (CgroupMemory(Path("/"), 1 * GiB, 2 * GiB), 0),
        (CgroupMemory(Path("/"), 5 * 1024**2, 0), 2 * 1024**2),
    ],
)
def test_default_dram_is_half_of_what_is_left_in_whole_pages(cgroup, expected):
    assert default_dram_capacity(Memory(32 * GiB, 16 * GiB, cgroup, None)) == expected


def test_numa_nodes_without_memory_are_left_out(tmp_path):
    top = "sys/devices/system/node"
    root = tree(
        tmp_path,
        {
            f"{top}/node1/meminfo": "Node 1 MemTotal: 0 kB",
            f"{top}/node10/meminfo": "Node 10 MemTotal: 4 kB",
            f"{top}/node10/cpulist": "8-15",
            f"{top}/node2/meminfo": "Node 2 MemTotal: 8 kB\nNode 2 MemFree: 1 kB",
            f"{top}/node2/cpulist": "0-7",
        },
    )
    assert [(n.number, n.memory, n.cores) for n in numa_nodes(root)] == [
        (2, 8192, frozenset(range(8))),
        (10, 4096, frozenset(range(8, 16))),
    ]


def memory(available: int, cgroup: CgroupMemory | None = None) -> Memory:
    return Memory(total=64 * GiB, available=available, cgroup=cgroup, memlock=None)


def test_a_part_of_every_limit_is_kept_for_the_program():
    left, why, slack = memory_left(memory(40 * GiB))
    assert (left, slack) == (36 * GiB, GiB)
    assert why == (
        "the machine leaves 40.0 GiB of 64.0 GiB, of which 4.0 GiB are kept for the program; "
        "end what else uses memory to have more"
    )


def test_the_limit_that_leaves_least_counts():
    cgroup = CgroupMemory(Path("/sys/fs/cgroup/job"), 4 * GiB, 3 * GiB)
    left, why, slack = memory_left(memory(40 * GiB, cgroup))
    assert (left, slack) == (0, GiB // 4)
    assert why == (
        "the cgroup /sys/fs/cgroup/job leaves 1.0 GiB of 4.0 GiB, of which 1.0 GiB are kept for the program; "
        "raise that limit to have more"
    )
    left, *_ = memory_left(memory(GiB, cgroup))
    assert left == -3 * GiB


def test_a_cgroup_that_is_full_leaves_less_than_nothing():
    left, *_ = memory_left(memory(40 * GiB, CgroupMemory(Path("/"), 4 * GiB, 4 * GiB)))
    assert left == -GiB


@pytest.mark.parametrize(
    ("text", "cores"), [("0-2,16", {0, 1, 2, 16}), ("3", {3}), ("", set()), ("0-1,4-5", {0, 1, 4, 5})]
)
def test_lists_of_cores_are_read_as_the_kernel_writes_them(text: str, cores: set[int]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None)])
def test_the_node_of_a_gpu_is_what_its_bus_says(tmp_path: Path, text: str, node: int | None) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(text)
    assert numa_node("00000000:1B:00.0", tmp_path) == node
    assert numa_node("00000000:FF:00.0", tmp_path) is None
    assert numa_node(None, tmp_path) is None


MOUNTS = """\
22 1 259:2 / / rw - ext4 /dev/nvme0n1p2 rw
23 22 0:24 / /dev/shm rw - tmpfs tmpfs rw
24 22 8:0 / /mnt/my\\040disk rw shared:1 master:2 - xfs /dev/sda rw
25 22 0:30 / /mnt rw - overlay overlay rw
26 22 0:31 / /mnt rw - nfs server:/export rw
27 22 254:0 / /srv rw - ext4 /dev/vda rw"""


@pytest.fixture
def mounts(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/self/mountinfo": MOUNTS,
            "sys/devices/pci0/nvme0n1/queue/rotational": 0,
            "sys/devices/pci0/nvme0n1/nvme0n1p2/partition": 2,
            "sys/devices/pci0/sda/queue/rotational": 1,
            "sys/devices/pci0/vda/queue/rotational": 1,
            "sys/dev/block/README": "",
        },
    )
    (root / "sys/dev/block/259:2").symlink_to("../../devices/pci0/nvme0n1/nvme0n1p2")
    (root / "sys/dev/block/8:0").symlink_to("../../devices/pci0/sda")
    (root / "sys/dev/block/254:0").symlink_to("../../devices/pci0/vda")
    return root


@pytest.mark.parametrize(
    ("path", "description"),
    [
        ("/var/tiers", "ext4 on nvme0n1 (solid state)"),
        ("/mnt/my disk/tiers", "xfs on sda (spinning)"),
        ("/srv/tiers", "ext4 on vda (virtual)"),
        ("/dev/shm", "tmpfs on tmpfs"),
        ("/mnt/elsewhere", "nfs on server:/export"),
    ],
)
def test_a_path_lies_on_its_longest_and_latest_mount(mounts, path, description):
    assert filesystem_of(Path(path), mounts).describe() == description


def test_tmpfs_is_in_memory_and_a_drive_is_not(mounts):
    assert filesystem_of(Path("/dev/shm/x"), mounts).in_memory
    assert not filesystem_of(Path("/var"), mounts).in_memory


def smi(folder: Path, body: str) -> str:
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return str(script)


def test_gpus_are_listed(tmp_path):
    line = "0, NVIDIA H100 80GB HBM3, 81559, 00000000:19:00.0, 580.95.05"
    assert find_gpus(smi(tmp_path, f"echo '{line}'")) == (
        Gpu(0, "NVIDIA H100 80GB HBM3", 81559 * 1024**2, "00000000:19:00.0", "580.95.05"),
    )


@pytest.mark.parametrize("body", ["exit 9", "echo no devices were found; exit 6"])
def test_a_driver_that_does_not_answer_is_no_gpu(tmp_path, body):
    assert find_gpus(smi(tmp_path, body)) == ()


def test_no_nvidia_smi_is_no_gpu(tmp_path):
    assert find_gpus(str(tmp_path / "absent")) == ()
