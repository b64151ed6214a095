"""Plans in the user's cache directory."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.unit.learners import MODEL, peak_of
from torch_tiers import plan_cache
from torch_tiers.migrator.controller.cached_plans import CachedPlans
from torch_tiers.migrator.controller.corrections import Corrections
from torch_tiers.migrator.model.links import PCIE_GEN5
from torch_tiers.migrator.policies import POLICIES
from torch_tiers.plan_cache import PlanCacheOnDisk

PLAN = POLICIES["auto"](MODEL, peak_of(MODEL) * 3 // 4, PCIE_GEN5)
LEARNED = CachedPlans((MODEL,), (PLAN,), Corrections(budget=-5, pace=0.5), PCIE_GEN5, 7)


def test_what_was_kept_is_found_for_the_same_program_in_the_same_place(tmp_path: Path) -> None:
    PlanCacheOnDisk(tmp_path, "H100", 20).store(LEARNED)
    found = PlanCacheOnDisk(tmp_path, "H100", 20).find(MODEL.sites)
    assert found is not None
    assert found.plans[0].is_the_same_as(PLAN)
    assert (found.traces[0].sites, found.corrections) == (MODEL.sites, LEARNED.corrections)
    assert PlanCacheOnDisk(tmp_path, "H200", 20).find(MODEL.sites) is None
    assert PlanCacheOnDisk(tmp_path, "H100", 20).find(MODEL.sites[1:]) is None


@pytest.mark.parametrize("content", ["", "no digest\n{}", "\x00"])
def test_a_file_that_was_cut_off_or_changed_is_no_plan(tmp_path: Path, content: str) -> None:
    cache = PlanCacheOnDisk(tmp_path)
    cache.store(LEARNED)
    (file,) = tmp_path.glob("*.json")
    file.write_text(content or file.read_text()[:-1])
    assert cache.find(MODEL.sites) is None


def test_where_others_may_write_nothing_is_found(tmp_path: Path) -> None:
    cache = PlanCacheOnDisk(tmp_path)
    cache.store(LEARNED)
    tmp_path.chmod(0o777)
    assert cache.find(MODEL.sites) is None


def test_several_threads_keep_whole_plans(tmp_path: Path) -> None:
    cache = PlanCacheOnDisk(tmp_path)
    cache.store(LEARNED)
    with ThreadPoolExecutor(4) as threads:
        keeping = [threads.submit(cache.store, LEARNED) for _ in range(40)]
        found = [cache.find(MODEL.sites) for _ in range(40)]
        for one in keeping:
            one.result()
    assert None not in found
    assert [file.suffix for file in tmp_path.iterdir()] == [".json"]


def test_a_directory_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = PlanCacheOnDisk(tmp_path / "file")
    cache.store(LEARNED)
    assert cache.find(MODEL.sites) is None


def test_the_oldest_plans_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MOST", 3)
    for number in range(5):
        PlanCacheOnDisk(tmp_path, number).store(LEARNED)
        for age, file in enumerate(sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime)):
            os.utime(file, (1000 + age, 1000 + age))
    assert len(list(tmp_path.iterdir())) == 3
    assert PlanCacheOnDisk(tmp_path, 4).find(MODEL.sites) is not None
    assert PlanCacheOnDisk(tmp_path, 0).find(MODEL.sites) is None
