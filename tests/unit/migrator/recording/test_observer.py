"""What formulas are told of a model's parameters."""

from __future__ import annotations

import weakref
from unittest import mock

import pytest
import torch
from torch import nn

from torch_tiers.migrator.recompute.origins import Origins
from torch_tiers.migrator.recording.observer import Observer


@pytest.fixture
def observer() -> Observer:
    return Observer(mock.Mock(), lambda tensor: True, lambda packed: packed)


def test_a_parameter_that_changed_since_the_forward_began_is_none_to_recompute_from(observer: Observer) -> None:
    model = nn.Linear(2, 2)
    observer.forward_begins(model, recording=True)
    assert observer.origins().leaf(model.bias) is not None
    with torch.no_grad():
        model.bias.add_(1)
    assert observer.origins().leaf(model.bias) is None
    observer.forward_begins(model, recording=False)
    assert observer.origins().leaf(model.bias) is not None


def test_once_recorded_only_what_formulas_asked_for_is_looked_at(observer: Observer) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))
    asked, late = (linear.bias for linear in (model[0], model[1]))
    observer.forward_begins(model, recording=True)
    assert observer.origins().leaf(asked) is not None
    observer.forward_begins(model, recording=False)
    assert set(observer._versions) == {id(asked)}
    assert observer.origins().leaf(asked) is not None
    assert observer.origins().leaf(late) is None  # whether it changed nobody can say
    observer.forward_begins(model, recording=False)
    assert observer.origins().leaf(late) is not None  # from now on


def test_where_no_formula_asks_for_parameters_none_is_looked_at(observer: Observer) -> None:
    """To look at 300 takes 0.3 ms, for which the device waits."""
    model = learned(observer)
    observer.forward_begins(model, recording=False, asks=False)
    assert not observer._versions
    observer.forward_begins(model, recording=False, asks=True)
    assert set(observer._versions) == {id(model.bias)}


def test_what_one_model_s_formulas_ask_for_is_looked_at_in_every_model_that_has_it(observer: Observer) -> None:
    shared, other = nn.Linear(2, 2), nn.Linear(2, 2)
    one, two = nn.Sequential(shared), nn.Sequential(shared, other)
    for root in (one, two):
        observer.forward_begins(root, recording=True)
    observer.origins().leaf(shared.bias)
    for root in (one, two, one):
        observer.forward_begins(root, recording=False)
        assert set(observer._versions) == {id(shared.bias)}


def learned(observer: Observer) -> nn.Linear:
    """A model whose formulas ask for its bias, in its first forward that is not recorded."""
    model = nn.Linear(2, 2)
    observer.forward_begins(model, recording=True)
    observer.origins().leaf(model.bias)
    observer.forward_begins(model, recording=False)
    return model


def change(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.add_(1)


def test_versions_are_read_after_a_step_and_not_before_the_forward(
    observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the device would wait for it."""
    model = learned(observer)
    for _ in range(3):
        change(model.bias)
        observer.stepped(all_of_it=True)
        with monkeypatch.context() as within:
            within.setattr("torch_tiers.migrator.recording.observer._versions", mock.Mock(side_effect=AssertionError))
            for _ in range(2):  # as with gradient accumulation
                observer.forward_begins(model, recording=False)
                assert observer.origins().leaf(model.bias) is not None


def test_where_parameters_change_between_step_and_forward_they_are_read_there(observer: Observer) -> None:
    """In the first such forward no formula takes them; weights that are clipped after each step, say, cost no more."""
    model = learned(observer)
    taken = []
    for _ in range(3):
        observer.stepped(all_of_it=True)
        change(model.bias)
        observer.forward_begins(model, recording=False)
        taken.append(observer.origins().leaf(model.bias) is not None)
    assert taken == [False, True, True]


def test_what_was_read_after_a_step_says_nothing_of_another_model(observer: Observer) -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    for root in (one, two):
        observer.forward_begins(root, recording=True)
        observer.origins().leaf(root.bias)
    observer.forward_begins(one, recording=False)
    observer.stepped(all_of_it=True)
    for root in (two, one):
        observer.forward_begins(root, recording=False)
        assert observer.origins().leaf(root.bias) is not None


def test_where_several_optimizers_step_versions_are_read_when_the_forward_begins(observer: Observer) -> None:
    """The second steps after the first: what was read in between is not what the forward finds."""
    model = nn.Linear(2, 2)
    observer.forward_begins(model, recording=True)
    observer.origins().leaf(model.bias)
    for _ in range(3):
        observer.forward_begins(model, recording=False)
        assert observer.origins().leaf(model.bias) is not None
        observer.stepped(all_of_it=True)
        change(model.bias)
        observer.stepped(all_of_it=False)


def test_what_changes_within_a_forward_is_no_reason_to_read_late(observer: Observer) -> None:
    model = learned(observer)
    change(model.bias)
    assert observer.origins().leaf(model.bias) is None
    observer.stepped(all_of_it=True)
    observer.forward_begins(model, recording=False)
    assert observer._reads_ahead


def test_what_is_asked_for_later_is_looked_at_from_the_next_forward_on_also_without_a_step(observer: Observer) -> None:
    model = learned(observer)
    observer.stepped(all_of_it=True)
    taken = []
    for _ in range(3):
        observer.forward_begins(model, recording=False)
        taken.append(observer.origins().leaf(model.weight) is not None)
    assert taken == [False, True, True]


def test_a_parameter_that_has_the_id_of_one_that_is_gone_is_not_taken_for_it() -> None:
    gone, new = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    versions = {id(new): (weakref.ref(gone), new._version)}
    assert Origins(lambda packed: packed, lambda tensor: tensor, versions, set(), set(), 0).leaf(new) is None
