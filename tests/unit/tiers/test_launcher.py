"""What launchers tell a process."""

from __future__ import annotations

import multiprocessing

import pytest

from torch_tiers import launcher


@pytest.mark.parametrize(
    ("world", "told", "rank"), [(None, None, 0), ("1", "3", 0), ("4", "3", 3), ("4", None, None), ("4", "three", None)]
)
def test_a_rank_is_what_a_launcher_says_and_0_of_who_is_alone(
    world: str | None, told: str | None, rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in (("WORLD_SIZE", world), ("RANK", told)):
        monkeypatch.delenv(variable, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)
    assert launcher.rank() == rank


def test_of_processes_that_a_program_starts_by_itself_none_knows_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(multiprocessing, "parent_process", multiprocessing.current_process)
    assert launcher.rank() is None
