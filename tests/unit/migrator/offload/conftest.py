from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.unit.by_hand import HandStore
from tests.unit.fake_kvikio import Double, FakeKvikio, build, overseen
from tests.unit.migrator.offload.rig import Rig, graph
from torch_tiers.allocator.sizes import PAGE


@pytest.fixture(autouse=True)
def by_reference_count_alone(every_save_is_an_operation_s_own: None) -> Iterator[None]:
    """Memory must not wait for the garbage collector, which many trainers switch off."""
    gc.disable()
    yield
    gc.enable()
    graph.clear()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


@pytest.fixture
def disk() -> Iterator[Rig]:
    store = HandStore(1 << 30, at_once=True)
    rig = Rig(dram=4 * PAGE, store=store)
    yield rig
    store.finish()
    rig.close()


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Double:
    return build(tmp_path_factory.mktemp("double"))


@pytest.fixture
def fake(library: Double, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKvikio]:
    with overseen(library, monkeypatch) as made:
        yield made
