"""The benchmark of kernels: what a step of one variant has more of than one of another."""

from __future__ import annotations

import json
from io import StringIO

import pytest

from benchmarks import kernels
from benchmarks.kernels import between, by_name, table
from benchmarks.turns import Span, work

PLAIN: list[Span] = [("gemm", 0, 10), ("gelu", 12, 15), ("gemm", 16, 26)]
AUTO: list[Span] = [("gemm", 0, 10), ("Memcpy DtoH", 5, 30), ("gelu", 13, 16), ("gelu", 18, 22), ("gemm", 24, 35)]


def test_kernels_are_added_up_by_name_and_their_medians_taken() -> None:
    steps = [PLAIN, PLAIN, [*PLAIN, ("fill", 30.0, 31.0)]]
    assert by_name(steps) == {"gemm": (2, 20), "gelu": (1, 3), "fill": (0, 0)}


def test_between_kernels_is_where_none_runs_whatever_lanes_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "FIRST", 1)
    assert between(PLAIN) == (2, 1)
    assert between(AUTO) == (3, 4)
    assert between([("long", 0, 10), ("beside it", 2, 3), ("next", 11, 12)]) == (0, 1)


def test_what_there_is_more_of_comes_first() -> None:
    lines = list(table({"plain": [PLAIN], "auto": [AUTO]}))
    assert lines[0] == "| us of a step | plain | auto | more |"
    assert lines[2:5] == [
        "| Memcpy DtoH | 0 x, 0 | 1 x, 25 | +25 |",
        "| gelu | 1 x, 3 | 2 x, 7 | +4 |",
        "| gemm | 2 x, 20 | 2 x, 21 | +1 |",
    ]
    assert lines[-1] == "| between the others | 0 | 0 | +0 |"


def test_a_worker_tells_the_kernels_of_a_step_where_it_is_asked_for_them() -> None:
    answers = StringIO()
    work("reference_gpt", "cpu", tiny=True, commands=StringIO("step\nkernels\n"), answers=answers)
    step, recorded = map(json.loads, answers.getvalue().splitlines())
    assert "kernels" not in step
    found = by_name([recorded["kernels"]])
    assert found["aten::gelu"][0] >= 2
    assert all(start <= end for _, start, end in recorded["kernels"])
