from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from torch_tiers.migrator.offload import filling

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@pytest.fixture
def every_save_is_an_operation_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved here no operation makes."""
    monkeypatch.setattr(filling, "_operation", count().__next__)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of two ranks, of which this is one; whoever waits for the other gets wrong numbers at once."""
    from torch.distributed.device_mesh import init_device_mesh  # which takes a second
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()
