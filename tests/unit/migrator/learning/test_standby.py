"""Plans that are made ahead, for when others need the memory bus."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.learners import MODEL, Later, large, peak_of, quiet
from torch_tiers.allocator.sizes import GiB
from torch_tiers.migrator.learning.background import FromProcess
from torch_tiers.migrator.learning.feedback import UNTOLD, Feedback
from torch_tiers.migrator.learning.learner import Learner
from torch_tiers.migrator.learning.made import Made
from torch_tiers.migrator.learning.standby import CROWDED, LOADED, Standby
from torch_tiers.migrator.links import PCIE_GEN5, WORSE
from torch_tiers.migrator.policies import POLICIES
from torch_tiers.migrator.simulator import simulate
from torch_tiers.migrator.timing import Lap

MEASURED = {"d2h": 0.97, "h2d": 0.78, "bus": 0.8}
BUSY = PCIE_GEN5.reduced(MEASURED)


pytestmark = pytest.mark.usefixtures("loud")


def peak(learner: Learner) -> int:
    (predicted,) = learner.predictions
    assert predicted is not None
    return predicted.peak["hbm"]


def settled(policy: str = "auto") -> tuple[Learner, Later]:
    """A learner whose plans are borne out, and who has asked for those to stand by."""
    learner, later = large(policy=policy)
    later.work()
    quiet(learner, 0)
    for _ in range(UNTOLD):
        assert not learner.relink(PCIE_GEN5)
        assert not quiet(learner, peak(learner))
    return learner, later


def standing_by(policy: str = "auto") -> tuple[Learner, Later]:
    """The same, and these are there: for a loaded bus, and for busy cores."""
    learner, later = settled(policy)
    for _ in range(2):
        later.work()
        quiet(learner, peak(learner))
    return learner, later


def test_once_plans_have_settled_others_are_made_for_a_loaded_bus_and_for_busy_cores() -> None:
    learner, later = settled()
    quiet(learner, peak(learner))
    assert len(later.jobs) == 2, "one after the other"
    assert not learner.planning, "these change nothing"
    later.work()
    quiet(learner, peak(learner))
    later.work()
    for _ in range(UNTOLD):
        quiet(learner, peak(learner))
    assert len(later.jobs) == 3, "once"


def test_who_makes_plans_ahead_is_told_to_end_once_they_are_outdated() -> None:
    """But not if they are for plans that are set aside, and come back."""
    standby, feedback = Standby(), Feedback(GiB, PCIE_GEN5)
    ahead = FromProcess[tuple[Made, ...]]()
    standby.add(ahead, PCIE_GEN5, BUSY)
    standby.set_aside((), (), feedback)
    standby.outdated()
    assert not ahead.given_up
    aside = standby.take_back(PCIE_GEN5, feedback.correction)
    assert aside is not None
    standby.restore(aside)
    standby.outdated()
    assert ahead.given_up


@pytest.mark.parametrize("how", ["less fits by now", "it is all forgotten"])
def test_who_makes_plans_for_what_does_not_come_back_is_told_to_end(how: str) -> None:
    standby, feedback = Standby(), Feedback(GiB, PCIE_GEN5)
    ahead = FromProcess[tuple[Made, ...]]()
    standby.add(ahead, PCIE_GEN5, BUSY)
    standby.set_aside((), (), feedback)
    standby.outdated()
    if how == "less fits by now":
        assert standby.take_back(PCIE_GEN5, feedback.correction - 1) is None
    else:
        standby.forget()
    assert ahead.given_up and not standby.has_aside


def test_when_others_need_the_bus_they_are_carried_out_at_once_and_again_the_next_time() -> None:
    learner, later = standing_by()
    alone = learner.plans
    for _ in range(2):
        assert learner.relink(BUSY)
        assert learner.plans[0].moved_bytes < alone[0].moved_bytes
        for _ in range(UNTOLD):
            quiet(learner, peak(learner))
        assert learner.relink(PCIE_GEN5)
        assert learner.plans == alone
    assert len(later.jobs) == 3


@pytest.mark.parametrize(("left", "job"), [((1.0, 0.93), 2), ((0.98, 0.96), 2), ((0.94, 0.86), 1), ((0.97, 0.78), 1)])
def test_of_these_they_are_carried_out_that_count_on_most_nearly_what_is_left(
    left: tuple[float, float], job: int
) -> None:
    """Lanes as beside JPEGs, two each, and beside copies, on H100s."""
    learner, later = standing_by()
    links = PCIE_GEN5.reduced(dict(zip(("d2h", "h2d"), left, strict=True)))
    assert learner.relink(links)
    assert learner.plans == tuple(made.plan for made in later.jobs[job][1].result())
    assert later.jobs[1][1].result() != later.jobs[2][1].result()


def test_where_others_leave_less_than_before_plans_stay_that_are_hardly_slower_for_it() -> None:
    """A GPT began with another plan 18 steps after the first that made room, to move 0 bytes in place of 512 MiB."""
    learner, later = standing_by()
    assert learner.relink(PCIE_GEN5.reduced({"bus": 1.0}))
    before, jobs = learner.plans, len(later.jobs)
    assert not learner.relink(BUSY)
    assert learner.plans == before
    (now,) = learner.predictions
    assert now is not None
    assert now.seconds == simulate(MODEL, BUSY, before[0]).seconds, "which is what laps are compared with"
    assert len(later.jobs) == jobs
    nothing = PCIE_GEN5.reduced({"bus": 0.02})
    assert simulate(MODEL, nothing, before[0]).seconds > 1.05 * simulate(MODEL, PCIE_GEN5, before[0]).seconds
    learner.relink(nothing)
    assert len(later.jobs) == jobs + 1


@pytest.mark.parametrize("other", ["more bandwidth", "less room"])
def test_for_a_load_that_is_less_or_with_less_room_for_moves_others_are_looked_for(other: str) -> None:
    """What moves little is hardly slower for any load, and may be slower than it need be for this one."""
    learner, later = standing_by()
    little = PCIE_GEN5.reduced({"bus": 0.05})
    assert not learner.relink(little)
    later.work()
    assert quiet(learner, peak(learner))
    (before,), jobs = learner.plans, len(later.jobs)
    assert simulate(MODEL, BUSY, before).seconds < 1.01 * simulate(MODEL, PCIE_GEN5, before).seconds
    assert not learner.relink(PCIE_GEN5.reduced({"bus": 0.06}))
    assert learner.plans == (before,) and len(later.jobs) == jobs, "for hardly more nobody is asked"
    learner.relink(BUSY if other == "more bandwidth" else replace(little, below=1 << 40, dram=1 << 40))
    assert learner.plans != (before,) or len(later.jobs) == jobs + 1


def test_plans_stay_only_where_others_needed_the_bus_before_and_do_now() -> None:
    """From none to some, what stands by is to be carried out, hardly slower as it may be."""
    learner, _ = standing_by()
    alone = learner.plans
    hardly = PCIE_GEN5.reduced({"bus": 0.999})
    assert learner.relink(hardly)
    assert learner.plans != alone
    assert learner.relink(PCIE_GEN5)
    assert learner.plans == alone


def test_where_others_need_the_bus_in_another_way_than_before_the_other_one_is_carried_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """First their workers keep the cores busy, and then lanes are slow, and the plan for the one is slower for it."""
    monkeypatch.setattr("torch_tiers.migrator.learning.standby.SLOWER", -1.0)  # which of this small program no plan is
    learner, later = standing_by()
    alone, jobs = learner.plans, len(later.jobs)
    for left, job in (({"bus": 1.0}, 2), (MEASURED, 1)):
        assert learner.relink(PCIE_GEN5.reduced(left))
        assert learner.plans == tuple(made.plan for made in later.jobs[job][1].result())
    assert learner.relink(PCIE_GEN5)
    assert learner.plans == alone
    assert len(later.jobs) == jobs


def test_what_is_corrected_under_a_load_is_planned_with() -> None:
    """What was made ahead knows nothing of that: carried out again, it was found too slow again, without end."""
    learner, later = standing_by()
    assert learner.relink(BUSY)
    (plan,) = learner.plans
    truly = simulate(MODEL, BUSY, plan)
    lap, jobs = Lap(0.8 * truly.seconds, {}), len(later.jobs)
    for _ in range(2 * UNTOLD):
        learner.relink(BUSY)
        learner.period_over(None, truly.peak["hbm"], whole=True, pressed=False, drifted=False, lap=lap)
        if len(later.jobs) > jobs:
            assert learner.plans == (plan,), "until those are there that were asked for"
    assert len(later.jobs) == jobs + 1
    later.work()
    quiet(learner, truly.peak["hbm"])
    assert learner.plans == tuple(made.plan for made in later.jobs[-1][1].result())


def test_where_one_of_them_is_not_there_the_other_will_do() -> None:
    learner, later = settled()
    job, loaded = later.jobs[1]
    loaded.set_result(job())
    assert learner.relink(PCIE_GEN5.reduced({"bus": 1.0}))
    assert learner.plans == tuple(made.plan for made in loaded.result())


def test_as_long_as_they_are_not_there_plans_are_made_for_what_is_left() -> None:
    learner, later = settled()
    alone = learner.plans
    assert not learner.relink(BUSY)
    assert learner.plans == alone
    later.work()
    assert quiet(learner, 0)
    assert learner.plans != alone


def test_plans_that_get_there_after_the_load_are_carried_out_and_what_was_ordered_is_dropped() -> None:
    learner, later = settled()
    alone = learner.plans
    assert not learner.relink(BUSY)
    job, ahead = later.jobs[1]
    ahead.set_result(job())
    assert quiet(learner, 0)
    assert learner.plans != alone and not learner.planning
    later.work()
    assert not quiet(learner, peak(learner))


@pytest.mark.parametrize("policy", ["flashneuron", "g10", "auto"])
def test_what_they_are_compared_with_is_foreseen_under_the_links_there_are(policy: str) -> None:
    """A lane was made slower twice: by what others leave of it, and by how much less that is than was planned with."""
    learner, later = settled(policy)
    later.work()
    left = PCIE_GEN5.reduced({"d2h": 0.78, "h2d": 0.66, "bus": 0.8})
    assert learner.relink(left) == (policy != "flashneuron"), "which takes no notice of lanes"
    jobs, (plan,) = len(later.jobs), learner.plans
    truly = simulate(MODEL, left, plan)
    lap = Lap(truly.seconds, truly.stalls)
    for _ in range(UNTOLD):
        assert not learner.relink(left)
        learner.period_over(None, truly.peak["hbm"], whole=True, pressed=False, drifted=False, lap=lap)
    assert len(later.jobs) == jobs
    assert learner.plans == (plan,)


def test_what_was_made_for_a_program_that_is_recorded_anew_goes_with_it() -> None:
    learner, later = settled()
    later.work()
    learner.forget()
    learner.period_over(MODEL, 0, whole=True, pressed=False, drifted=False)
    assert not learner.relink(BUSY)
    assert learner.plans == ()


@pytest.mark.parametrize("lane", ["d2h", "h2d"])
def test_where_much_less_is_left_than_was_taken_for_granted_plans_are_made_for_that(lane: str) -> None:
    learner, later = settled()
    later.work()
    less = {**LOADED, lane: LOADED[lane] - WORSE - 0.01}
    assert not learner.relink(PCIE_GEN5.reduced(less))
    assert learner.planning


def test_for_tiers_that_hold_other_than_was_known_they_are_not_carried_out() -> None:
    learner, later = settled()
    later.work()
    assert not learner.relink(replace(BUSY, below=1 << 30))
    assert learner.planning


def test_what_was_corrected_since_is_planned_with() -> None:
    learner, later = settled()
    later.work()
    assert not quiet(learner, 2 * peak(learner))  # which asks for plans that hold less
    later.work()
    quiet(learner, 0)
    before = len(later.jobs)
    assert not learner.relink(BUSY)
    assert len(later.jobs) == before + 1


def test_where_nobody_watches_the_links_none_are_made() -> None:
    learner, later = large()
    later.work()
    quiet(learner, 0)
    for _ in range(2 * UNTOLD):
        assert not quiet(learner, peak(learner))
    assert learner.settled
    assert len(later.jobs) == 1


def test_plans_that_move_nothing_need_none_to_stand_by() -> None:
    later = Later()
    learner = Learner(POLICIES["auto"], 2 * peak_of(MODEL), submit=later)
    learner.period_over(MODEL, 0, whole=True, pressed=False, drifted=False)
    later.work()
    for _ in range(2 * UNTOLD):
        learner.relink(PCIE_GEN5)
        quiet(learner, peak_of(MODEL))
    assert not any(plan.moved_bytes for plan in learner.plans)
    assert len(later.jobs) == 1


def test_what_could_not_be_made_ahead_is_made_when_it_is_needed() -> None:
    """The planner's failure is not the program's."""
    learner, later = settled()
    for _, ahead in later.jobs[1:]:
        ahead.set_exception(MemoryError("the planner was killed"))
    assert not learner.relink(BUSY)
    assert learner.planning


def test_what_was_made_ahead_does_not_replace_a_correction_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made before that: the budget was cut twice for the same excess."""
    monkeypatch.setattr("torch_tiers.migrator.planner.quiet.QUIET", 1.0)  # all stays beside others
    learner, later = standing_by()
    later.work()
    assert not learner.relink(PCIE_GEN5.reduced(CROWDED))
    target = int(0.75 * peak_of(MODEL))
    over = int(1.1 * target)
    assert not quiet(learner, over), "others are made"
    assert not quiet(learner, over) and learner.planning
    later.work()
    quiet(learner, target)
    (made,) = learner.predictions
    assert made is not None
    assert 1.5 * (target - over) < made.peak["hbm"] - target <= target - over
    assert not quiet(learner, int(0.99 * target)) and not learner.planning, "once"
