from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.rig import Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()
