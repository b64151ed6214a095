"""When operators are recorded, and which."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.unit.migrator.tape.records import names
from torch_tiers.migrator.tape.recorder import Recorder


def test_nothing_is_recorded_outside_of_a_record(recorder: Recorder) -> None:
    x = torch.ones(3)
    x.sin()
    recorder.begin()
    x.cos()
    assert names(recorder) == ["cos"]
    x.tan()
    assert recorder.listed() is None


def test_nothing_is_recorded_in_an_untracked_scope(recorder: Recorder) -> None:
    x = torch.ones(3)
    recorder.begin()
    with recorder.untracked():
        x.sin()
        with recorder.untracked():
            x.sin()
        x.sin()
    x.cos()
    assert names(recorder) == ["cos"]


def test_one_record_at_a_time(recorder: Recorder) -> None:
    assert recorder.begin() and not recorder.begin()
    recorder.stop()
    assert recorder.begin()


def test_what_an_operator_calls_is_not_recorded(recorder: Recorder) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    recorder.begin()
    F.layer_norm(x, (3,))
    F.linear(x, x)
    assert names(recorder) == ["native_layer_norm", "mm"]


def test_views_are_recorded_only_where_all_that_ran_is_to_be_listed(recorder: Recorder) -> None:
    """They compute nothing, and are more than half of what a transformer runs."""

    def program() -> list[str]:
        x = torch.ones(2, 3)
        recorder.begin()
        x[1:].unsqueeze(0).sin().view(3, 1).t().expand(2, 3).unbind(1)
        return names(recorder)

    assert program() == ["sin"]
    with recorder.with_views():
        assert program() == ["slice.Tensor", "unsqueeze", "sin", "view", "t", "expand", "unbind.int"]
    assert program() == ["sin"]


def test_shapes_are_those_of_what_an_operator_returned(recorder: Recorder) -> None:
    x = torch.ones(2, 3)
    recorder.begin()
    torch.max(x, 1)
    torch._foreach_sin([x, x.t()])
    x.add_(1)
    assert [shapes for _, shapes in recorder.listed() or []] == [[(2,), (2,)], [(2, 3), (3, 2)], [(2, 3)]]


def test_operator_that_raised_is_recorded_and_those_after_it(recorder: Recorder) -> None:
    x = torch.ones(2, 3)
    recorder.begin()
    with pytest.raises(RuntimeError):
        x @ x
    x.cos()
    assert names(recorder) == ["mm", "cos"]
