"""The benchmark of allocators, on the CPU: processes that take turns, and a table."""

from __future__ import annotations

from benchmarks.allocators import compare, table


def test_two_processes_take_turns_and_are_compared() -> None:
    rows = compare("reference_gpt", ["plain", "expandable"], 3, device="cpu", tiny=True)
    assert [row.variant for row in rows] == ["plain", "expandable"]
    assert rows[0].ratio.median == 1
    assert all(row.step > 0 and row.startup > row.step for row in rows)
    assert table(rows).count("\n") == 3
