"""What iterations tell is planned with, and plans are adopted as far as the tiers below HBM hold what they offload."""

from __future__ import annotations

import pytest

from tests.unit.rig import Rig, layers, run
from torch_tiers.allocator.sizes import PAGE, GiB, MiB
from torch_tiers.migrator.controller.feedback import Feedback
from torch_tiers.migrator.controller.learner import Learner
from torch_tiers.migrator.model.links import PCIE_GEN5, Links, usable
from torch_tiers.migrator.model.plan import PageGroup, Plan
from torch_tiers.migrator.offload.engine import EVERY
from torch_tiers.migrator.saved.device_plans import CLOSELY, SAMPLED

pytestmark = pytest.mark.usefixtures("every_save_is_an_operation_s_own")


def test_an_iteration_that_was_granted_less_does_not_correct_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """What had no room below lies in HBM, for which the next plans would have left room."""
    rig = Rig(dram=PAGE, budget=8 * MiB, policy="move")
    learned = []
    monkeypatch.setattr(Feedback, "iteration_over", lambda *given, **more: learned.append(given))
    for _ in range(4):
        run(rig, layers(6, 2 * MiB))
    assert not learned and rig.mover.recorder is None
    rig.close()


@pytest.mark.parametrize("capturing", [False, True])
def test_what_the_allocator_caches_goes_with_the_plans_that_it_fits(
    monkeypatch: pytest.MonkeyPatch, rig: Rig, capturing: bool
) -> None:
    """Taken anew between what is in use, it made a GPT's allocator flush in every step after two changes of plans."""
    renewed: list[bool] = []
    monkeypatch.setattr(rig.engine.compute, "renew", lambda: renewed.append(True))
    monkeypatch.setattr(rig.engine.compute, "capturing", lambda: capturing)
    rig.planned(PageGroup(("a:0",), PAGE, 0, 2))
    assert not renewed
    monkeypatch.setattr(Learner, "plans", (Plan("auto", GiB, {}, ()),))
    rig.mover.plans.adopt()
    assert renewed == ([] if capturing else [True])


def test_waits_are_timed_while_that_corrects_plans_and_then_now_and_then(rig: Rig) -> None:
    """To time them costs more than to wait."""
    for _ in range(CLOSELY + 3 * SAMPLED):
        run(rig, layers(2))
    told = rig.compute.stands_for
    assert told[:CLOSELY] == [1] * CLOSELY
    assert sorted(told[-SAMPLED:]) == [0] * (SAMPLED - 1) + [SAMPLED], "and what is timed stands for the rest"
    run(rig, layers(3))  # which the plan mispredicts, and so recorded
    assert rig.mover.recorder is not None and told[-1] == 1


def test_waits_are_timed_for_as_long_as_plans_have_not_settled(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as while the faster of two is found: each has to be told what its iterations take."""
    monkeypatch.setattr(Learner, "settled", False)
    for _ in range(2 * CLOSELY):
        run(rig, layers(2))
    assert rig.compute.stands_for == [1] * 2 * CLOSELY


def test_waits_are_timed_closely_again_once_plans_stay_with_another_prediction(rig: Rig) -> None:
    for _ in range(CLOSELY + SAMPLED):
        run(rig, layers(2))
    slower = PCIE_GEN5.scaled({"h2d": 0.5})
    assert not rig.mover.plans.apply_advice(None, slower, recorded=False), "all moves, whatever the links"
    del rig.compute.stands_for[:]
    for _ in range(CLOSELY - 1):
        run(rig, layers(2))
    assert rig.compute.stands_for == [1] * (CLOSELY - 1)


def test_a_plan_that_asks_for_more_than_there_is_below_hbm_is_carried_out_as_far_as_it_goes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(dram=8 * MiB, budget=512 * MiB)
    for _ in range(4):
        run(rig, layers(10))
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("the plan has 10.0 MiB in dram at once, which holds 8.0 MiB: raise TIERS_DRAM")
    assert line.endswith("tensors that it has no room for stay in hbm, beyond the budget if need be")
    assert rig.out.copies
    rig.close()


@pytest.mark.parametrize(("more", "recorded"), [(1, False), (2, True)])
def test_a_considerable_part_that_is_unforeseen_starts_recording_again(rig: Rig, more: int, recorded: bool) -> None:
    """Not each expert that gets a token for the first time: a program of those was recorded in every sixth step."""
    run(rig, layers(10))
    run(rig, layers(10 + more))
    assert (rig.mover.recorder is not None) == recorded


@pytest.mark.parametrize(("less", "recorded"), [(1, False), (5, True)])
def test_a_considerable_part_that_no_longer_comes_starts_recording_again(rig: Rig, less: int, recorded: bool) -> None:
    run(rig, layers(10))
    run(rig, dict(list(layers(10).items())[less:]))
    assert (rig.mover.recorder is not None) == recorded


@pytest.mark.parametrize(("size", "recorded"), [(1.0, False), (0.9, False), (0.5, True), (2.0, True)])
def test_iterations_of_another_size_are_recorded_again(rig: Rig, size: float, recorded: bool) -> None:
    """Some samplers begin with the longest batch: what all others saved moved for good."""
    run(rig, layers(10))
    run(rig, layers(10, nbytes=int(size * MiB)))
    assert (rig.mover.recorder is not None) == recorded


def test_a_known_kind_of_iteration_is_no_misprediction(rig: Rig) -> None:
    one, other = layers(10, name="generator"), layers(6, name="discriminator")
    for _ in range(8):
        run(rig, one)
        run(rig, other)
    assert rig.mover.recorder is None
    assert not any([run(rig, one), run(rig, other), run(rig, one)])


def test_plans_that_come_just_as_a_recomputation_is_found_to_differ_are_not_adopted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were made with what differs. All is recorded anew."""
    run(rig, layers(10))
    monkeypatch.setattr(rig.mover.learner, "iteration_over", lambda *given, **more: True)
    monkeypatch.setattr(rig.mover.checks, "iteration_over", lambda: True)
    assert not rig.mover.end_iteration(whole=True)
    assert rig.mover.recorder is not None and not rig.mover.learner.plans


def test_a_group_that_left_under_pressure_is_no_misprediction(rig: Rig) -> None:
    run(rig, layers(10))
    rig.engine.hbm.limit = 0
    run(rig, layers(10))
    assert rig.mover.recorder is None


def test_what_the_tiers_below_hold_less_than_planned_is_planned_for_anew(rig: Rig) -> None:
    """A node's memory that other ranks took, or a disk that is full, ended the job in the middle."""
    small, large = (Plan("auto", GiB, {}, (PageGroup(("a:0",), nbytes, 0, 1),)) for nbytes in (8 * MiB, 128 * MiB))
    asked = []

    class Planner:
        plans, traces = (large,), ()

        def plan_for_less(self, below: int) -> None:
            asked.append(below)
            self.plans = (small,)

        def relink(self, links: Links) -> bool:
            asked.append(links.below)
            return False

    rig.mover.recorder, rig.mover.plans.learner = None, Planner()
    rig.mover.plans.adopt()
    assert asked == [usable(64 * MiB)]
    # What the monitor says of the lanes does not make the tiers larger.
    rig.mover.plans.apply_advice(None, PCIE_GEN5, recorded=False)
    assert asked[1:] == asked[:1]
    rig.mover.plans.learner.plan_for_less = lambda below: asked.clear()
    rig.mover.plans.learner.plans = (large,)
    rig.mover.plans.adopt()
    assert asked  # nothing else was to be expected of a plan for the same


def test_it_is_told_to_who_corrects_plans_that_groups_come_back_in_another_order(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    monkeypatch.setattr(rig.mover.learner, "rearranged", lambda: told.append(rig.engine.ahead))
    for ahead in (None, 8, 8, 16, None, None):
        rig.mover.plans.apply_advice(ahead, PCIE_GEN5, recorded=True)
    assert told == [8, 16, EVERY]
