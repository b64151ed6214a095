"""What plans say of sites, as the hooks look it up."""

from __future__ import annotations

from typing import Any

from torch_tiers.migrator.model.plan import PageGroup
from torch_tiers.migrator.recompute.verified import Took, Verified
from torch_tiers.migrator.saved.actions import Go, Recompute, Stay
from torch_tiers.migrator.saved.agenda import Agenda
from torch_tiers.migrator.saved.garbage import KEPT, MADE, MOVED

mover: Any = object()
stay = Stay(mover, 1, 1)
go = Go(mover, PageGroup(("Net.fc:2",), 1, last_birth=0, first_use=1))


def recompute(*found: str) -> Recompute:
    return Recompute(mover, "Net.act:0", Verified({"exp": Took(0.0, 0)}, (), 0, frozenset(found)))


def test_sites_that_no_plan_knows_have_no_action() -> None:
    agenda = Agenda([("Net.fc:2", go), ("Net.fc:0", stay)])
    assert list(agenda.of("Net.fc")) == [stay, None, go]
    assert not agenda.of("Net.other")


def test_the_program_outside_of_modules_is_a_module_without_a_name() -> None:
    assert list(Agenda([(":0", stay)]).of("")) == [stay]


def test_of_two_actions_for_one_site_the_last_holds() -> None:
    assert list(Agenda([("Net:0", stay), ("Net:0", go)]).of("Net")) == [go]


def test_sites_from_which_others_are_made_are_noted_by_module() -> None:
    agenda = Agenda([("Net.act:0", recompute("Net.fc:1", "Net.fc:3"))])
    assert set(agenda.noted("Net.fc")) == {1, 3}
    assert not agenda.noted("Net.act")


def test_it_tells_what_the_hooks_will_hold() -> None:
    agenda = Agenda([("Net:0", stay), ("Net:2", go), ("Net:3", recompute())])
    assert agenda.objects == KEPT + MOVED + MADE


def test_modules_in_which_all_stays_unheard_are_bypassed_and_those_around_them_as_what_came_before() -> None:
    """A residual block saves nothing: the hooks went off and on again around each of its busy modules."""
    bypassed = Stay(mover, 1, 1, bypass=True)
    agenda = Agenda(
        [("Net.a.b.fc:0", bypassed), ("Net.a.b.act:0", bypassed), ("Net.a.b.act:1", stay), ("Net.a.bn:0", bypassed)]
    )
    assert agenda.bypass == {"Net.a": None, "Net.a.b": None, "Net.a.b.fc": True, "Net.a.bn": True}
    assert agenda.objects == KEPT * 2


def test_where_no_module_is_bypassed_none_is_told_apart() -> None:
    assert not Agenda([("Net.a.fc:0", stay)]).bypass


def test_outermost_modules_are_never_bypassed_nor_is_the_program_itself() -> None:
    bypassed = Stay(mover, 1, 1, bypass=True)
    assert not Agenda([(":0", bypassed), ("Net:0", bypassed)]).bypass


def test_modules_from_which_others_are_made_are_not_bypassed() -> None:
    bypassed = Stay(mover, 1, 1, bypass=True)
    agenda = Agenda([("Net.fc:0", bypassed), ("Net.act:0", recompute("Net.fc:0"))])
    assert not agenda.bypass


def test_modules_of_which_the_hooks_must_be_told_are_not_bypassed() -> None:
    bypassed = Stay(mover, 1, 1, bypass=True)
    agenda = Agenda([("Net.fc:0", bypassed), ("Net.head:0", bypassed)], heard={"Net.head:3"})
    assert agenda.bypass == {"Net.fc": True}
