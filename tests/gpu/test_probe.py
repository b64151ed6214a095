"""The probe's paths to and from a GPU, on small sizes."""

from __future__ import annotations

import os
from pathlib import Path as Folder

import pytest

from torch_tiers.allocator.sizes import KiB, MiB
from torch_tiers.probe.affinity import Node
from torch_tiers.probe.catalogue import Disks, Gpu, catalogue
from torch_tiers.probe.host import HostMemory
from torch_tiers.probe.machine import look
from torch_tiers.probe.measure import Effort, measure, window

NODE = Node(0, frozenset(os.sched_getaffinity(0)))


@pytest.mark.gpu
def test_every_path_of_a_gpu_moves_all_of_it_or_is_waived(tmp_path: Folder) -> None:
    sizes = Effort(sizes=(4 * KiB, MiB, 16 * MiB), samples=2)
    memory = HostMemory(4 * window(16 * MiB), pinned=True)
    try:
        probes = catalogue([Gpu(0, NODE)], [NODE], memory, Disks((tmp_path,), True))
        found = measure(probes, lambda probe: sizes, seconds=60)
    finally:
        memory.close()
    assert {result.path.label: result.reason for result in found if result.status == "failed"} == {}
    measured = {result.path.kind for result in found if result.status == "measured"}
    assert measured >= {"d2h", "h2d", "both", "d2h.torch", "hbm_write.bounce", "hbm_read.bounce"}
    assert look((Gpu(0, NODE),), (NODE,), (tmp_path,), "off").gpus[0].sm_clock_mhz
