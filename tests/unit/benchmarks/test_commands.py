"""Benchmarks that need no test of their parts: each runs, small and without a GPU, and prints its table."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.request_latency import whole_steps
from tests.unit import warm


@pytest.mark.parametrize(
    ("command", "shows"),
    [
        ("hook_times", ["policy auto", "policy move"]),
        ("replay_cost --count 2 --rounds 1", ["llama block", "t5 layer"]),
        ("tape_cost --count 20 --rounds 1", ["addmm", "a layer's step"]),
    ],
)
def test_it_runs(
    command: str, shows: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *arguments = command.split()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with warm.interpreter():
        import_module(f"benchmarks.{name}").main()
    printed = capsys.readouterr().out
    assert [word for word in shows if word not in printed] == []


def test_latency_is_taken_on_whole_steps() -> None:
    assert {"gpt-1.3b", "resnet152-b256"} <= set(whole_steps())
    assert "long-context-moving" not in whole_steps()  # lifetimes for packing, without the events of a step
