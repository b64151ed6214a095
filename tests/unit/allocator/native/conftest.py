from __future__ import annotations

from collections.abc import Iterator

import pytest

from allocator.native import Core
from allocator.sizes import MiB
from tests.unit.cores import opened


@pytest.fixture
def core() -> Iterator[Core]:
    with opened(64 * MiB, 64 * MiB) as made:
        yield made
