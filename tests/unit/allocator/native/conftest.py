from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.cores import opened
from torch_tiers.allocator.native import Core
from torch_tiers.allocator.sizes import MiB


@pytest.fixture
def core() -> Iterator[Core]:
    with opened(64 * MiB, 64 * MiB) as made:
        yield made
