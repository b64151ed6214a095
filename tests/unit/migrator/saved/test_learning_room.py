"""Before there is a plan nothing leaves HBM, as long as the program may fit; and what the allocator is told of that."""

from __future__ import annotations

import pytest
import torch

from tests.unit.rig import Rig, layers, run
from torch_tiers.allocator.sizes import GiB, KiB, MiB
from torch_tiers.migrator.offload.filling import PURGE
from torch_tiers.migrator.offload.group import State

pytestmark = pytest.mark.usefixtures("every_save_is_an_operation_s_own")


def test_nothing_leaves_before_there_is_a_plan_where_there_is_room_and_dram_for_what_there_is_not() -> None:
    """A program that fits was to move all that it saves while it was recorded: seven times its time, for six steps."""
    rig = Rig(budget=64 * MiB, recordings=2, spills=True)
    for _ in range(2):
        run(rig, layers(24))
        assert not rig.out.copies
    assert rig.mover.learner.plans
    rig.close()


def test_once_a_program_turns_out_not_to_fit_all_that_it_saves_goes() -> None:
    rig = Rig(budget=64 * MiB, recordings=2, spills=True)
    kept = [rig.save(f"a:{k}", tensor=torch.zeros(4 * MiB, dtype=torch.uint8)) for k in range(10)]
    assert not rig.out.copies and rig.engine.hbm.resident == rig.mover.filling.room == 40 * MiB
    kept.append(rig.save("a:10", tensor=torch.zeros(4 * MiB, dtype=torch.uint8)))
    assert rig.out.copies == len(kept)
    assert rig.engine.hbm.resident <= rig.mover.filling.room == 8 * MiB
    assert not any(rig.restore(moved).any() for moved in kept)
    rig.mover.end_iteration(whole=True)
    assert rig.mover.plans.take_news(), (
        "what stayed so far may be unmapped: 3.6 times of what was alive was, in the next step"
    )
    rig.close()


def test_what_waited_goes_with_whatever_is_saved_next() -> None:
    """Not with what next fills a group, which from then on is a larger one."""
    rig = Rig(spills=True)
    waits = rig.save("a:0", tensor=torch.zeros(4 * MiB, dtype=torch.uint8))
    rig.mover.plans.expect_too_much()
    assert not rig.out.copies
    rig.save("a:1")
    assert rig.out.copies == 1 and waits.saved.group.state is not State.FILLING
    rig.close()


def test_the_room_before_there_is_a_plan_is_what_the_rest_of_the_program_was_seen_to_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that a BERT saved came back over the link, 24 GB, in each of five steps before its plan: a second each."""
    rig = Rig(budget=64 * MiB, recordings=5, spills=True)
    assert rig.mover.filling.room == 40 * MiB, "a quarter of it is for what nobody knows, an eighth for trials"
    monkeypatch.setattr(rig.compute, "static", 10 * MiB)
    program = layers(30, nbytes=2 * MiB)
    run(rig, program)
    assert not rig.mover.filling.patient and rig.mover.filling.room == 46 * MiB
    before = rig.back.copies
    run(rig, program)
    assert rig.back.copies - before < before / 2, "what there is room for need not come back"
    run(rig, program, overflow=MiB)
    assert rig.mover.filling.room == 8 * MiB, "HBM was full with all that"
    run(rig, layers(2))
    assert rig.mover.filling.room == 8 * MiB
    rig.close()


def test_what_lives_on_since_the_first_step_is_not_there_for_what_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer's state."""
    rig = Rig(budget=64 * MiB, recordings=4, spills=True)
    monkeypatch.setattr(rig.compute, "allocated", lambda: 8 * MiB)
    monkeypatch.setattr(rig.compute, "static", 10 * MiB)
    run(rig, layers(2))
    assert rig.mover.filling.room == (64 - 8 - 10 - 8) * MiB
    rig.close()


def test_nothing_is_waited_for_where_dram_holds_next_to_nothing() -> None:
    """Past it a program that does not fit is at an end."""
    rig = Rig(dram=8 * MiB, budget=64 * MiB, spills=True)
    assert not rig.mover.filling.patient
    assert rig.mover.filling.room == 8 * MiB
    rig.close()


def test_what_may_stay_is_counted_storage_by_storage_where_these_are_large() -> None:
    rig = Rig(budget=2 * GiB, spills=True)
    one, other = (rig.save(f"a:{k}", tensor=torch.zeros(16 * MiB, dtype=torch.uint8)) for k in range(2))
    small = [rig.save(f"b:{k}") for k in range(2)]
    assert one.saved.group is not other.saved.group
    assert small[0].saved.group is small[1].saved.group
    rig.close()


def test_graphs_that_nobody_uses_leave_nothing_behind_while_others_live_on() -> None:
    """Somebody serves, and forgot ``no_grad``."""
    rig = Rig(budget=64 * MiB, spills=True)
    kept = rig.save("a:0", tensor=torch.zeros(4 * MiB, dtype=torch.uint8))
    for k in range(3 * PURGE):
        rig.save(f"b:{k}", tensor=torch.empty(4 * MiB, dtype=torch.uint8))
        rig.mover.collect()
    assert len(rig.mover.filling._full) <= PURGE
    assert not rig.out.copies and not rig.mover.filling.offloaded
    assert kept.saved.group in rig.mover.filling._full
    rig.close()


@pytest.mark.parametrize(("budget", "news"), [(64 * MiB, False), (8 * MiB, True)])
def test_a_plan_by_which_everything_stays_as_it_did_is_no_news(budget: int, *, news: bool) -> None:
    """The allocator was to lay out anew what was asked for as before: three steps of a second."""
    rig = Rig(budget=budget, policy="auto", recordings=2, spills=True)
    run(rig, layers(12))
    assert rig.mover.plans.take_news() == news, "it does not fit, and moves from now on"
    run(rig, layers(12))
    assert rig.mover.learner.plans
    assert rig.mover.plans.take_news() == news
    assert not rig.mover.plans.take_news(), "once"
    rig.close()


def test_a_plan_by_which_everything_stays_is_news_where_an_iteration_before_it_moved() -> None:
    """What the allocator has laid out for that one is of no use any more."""
    rig = Rig(budget=64 * MiB, policy="auto", recordings=3, spills=True)
    rig.mover.plans.expect_too_much()
    run(rig, layers(12))
    assert rig.mover.plans.take_news(), "that it moves at all"
    run(rig, layers(12))
    run(rig, layers(1, nbytes=64 * KiB, name="short"))
    assert rig.mover.learner.plans and all(plan.keeps_everything for plan in rig.mover.learner.plans)
    assert rig.mover.plans.take_news()
    rig.close()


def test_with_what_is_lent_nothing_leaves_before_there_is_a_plan() -> None:
    """A drive would take twenty seconds for what a step saves; HBM that is free takes it at once."""
    rig = Rig(dram=8 * MiB, budget=64 * MiB, recordings=2, spills=True, lent=256 * MiB)
    program = layers(120)
    run(rig, program)
    assert not rig.mover.plans.room.pays_back()
    assert rig.out.copies == 0
    for _ in range(2):
        run(rig, program)
    assert rig.mover.plans.room.pays_back()
    assert not rig.mover.plans.room.pays_back()
    rig.close()
