"""What measured iterations correct: the links, the program's own times and those of our hooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.unit.modelled import gpt
from torch_tiers.allocator.sizes import GiB, MiB
from torch_tiers.migrator.controller.budget import SETTLING, SURE
from torch_tiers.migrator.controller.feedback import (
    AGREEING,
    FASTEST,
    HOSTS,
    LATE,
    LATE_PACE,
    LEAST_LATE,
    OFF_PACE,
    UNTIMED,
    Feedback,
)
from torch_tiers.migrator.controller.outcome import IterationOutcome
from torch_tiers.migrator.controller.planned import PlannedIteration
from torch_tiers.migrator.model.clocks import Clocks
from torch_tiers.migrator.model.links import PCIE_GEN5, Calls, Links
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.model.timing import HookTime, HostTime, IterationTime, at_pace
from torch_tiers.migrator.model.trace import Recipe, Site, Trace
from torch_tiers.migrator.planner.build import make_plan
from torch_tiers.migrator.simulator import Simulated, simulate

TARGET = 1000 * MiB
MODEL = gpt(blocks=8)
BUSY = PCIE_GEN5.reduced({"d2h": 1.0, "h2d": 0.94, "bus": 0.9})
BUSIER = BUSY.reduced({"h2d": 0.7})
STAYS = make_plan("test", MODEL, (), GiB)
PREDICTED = simulate(MODEL, PCIE_GEN5, STAYS)
MADE = (PlannedIteration(STAYS, PREDICTED),)


def all_moves(links: Links = PCIE_GEN5) -> tuple[Simulated, dict[str, float]]:
    """What a plan comes to by which all moves, and the stalls of a lane that takes twice as long."""
    plan = make_plan("test", MODEL, [life.ident for life in MODEL.lifetimes], GiB)
    predicted = simulate(MODEL, links, replace(plan, room=GiB))
    return predicted, {"h2d": predicted.stalls["h2d"] + predicted.busy["h2d"]}


# ------------------------------------------------------------------------------------------- the links


def test_a_lane_that_is_waited_for_longer_than_predicted_is_slower() -> None:
    feedback, (predicted, late) = Feedback(TARGET, PCIE_GEN5), all_moves()
    assert not feedback.stalls(predicted.stalls, predicted)
    assert feedback.stalls(late, predicted)
    assert feedback.links == replace(PCIE_GEN5, h2d=PCIE_GEN5.h2d / 2)


def test_a_stall_that_is_not_worth_a_plan_changes_nothing() -> None:
    predicted = simulate(MODEL, PCIE_GEN5, replace(make_plan("test", MODEL, [0], GiB), room=GiB))
    for ideal, late, changes in (
        (1.0, 0.5 * LATE, False),
        (1.0, 1.5 * LATE, True),
        (1e-2, 0.9 * LEAST_LATE, False),
        (1e-2, 1.1 * LEAST_LATE, True),
    ):
        stalls = {"d2h": predicted.stalls["d2h"] + late}
        assert Feedback(TARGET, PCIE_GEN5).stalls(stalls, replace(predicted, ideal=ideal)) == changes


def test_a_lane_that_was_found_slower_is_slower_with_other_links_too() -> None:
    feedback, (predicted, late) = Feedback(TARGET, PCIE_GEN5), all_moves()
    feedback.stalls(late, predicted)
    feedback.relink(replace(PCIE_GEN5, d2h=30e9, h2d=20e9))
    assert feedback.links == replace(PCIE_GEN5, d2h=30e9, h2d=10e9)
    feedback.relink(PCIE_GEN5)
    assert feedback.links == replace(PCIE_GEN5, h2d=PCIE_GEN5.h2d / 2)


def test_what_is_corrected_is_told_with_its_numbers() -> None:
    feedback, (predicted, late) = Feedback(TARGET, PCIE_GEN5), all_moves()
    feedback.stalls(late, predicted)
    feedback.budget.peak(IterationOutcome(None, TARGET + 64 * MiB), TARGET, TARGET, may_grow=True)
    assert str(feedback) == "budget -64.0 MiB, recorded times x 1.00, h2d gives 50% of its bandwidth"


# ------------------------------------------------------------------------------------------- the pace


def gone_by(iterations: int = SETTLING) -> Feedback:
    """Feedback that has seen so many iterations under the plans that there are."""
    feedback = Feedback(TARGET, PCIE_GEN5)
    pass_by(feedback, iterations)
    return feedback


def pass_by(feedback: Feedback, iterations: int) -> None:
    for _ in range(iterations):
        feedback.budget.peak(IterationOutcome(None, TARGET), TARGET, TARGET, may_grow=True)


def changes(feedback: Feedback, parts: Sequence[float], predicted: Simulated = PREDICTED) -> list[bool]:
    """What iterations that take these parts of what was predicted change."""
    return [feedback.iteration(IterationTime(part * predicted.seconds, {}), predicted) for part in parts]


def test_times_that_were_recorded_too_long_are_corrected_as_soon_as_two_iterations_agree() -> None:
    feedback = gone_by()
    assert changes(feedback, [1 + OFF_PACE / 2] * AGREEING) == [False] * AGREEING
    waits = IterationTime(0.8 * PREDICTED.seconds + 1.0, {"h2d": 1.0})
    assert [feedback.iteration(waits, PREDICTED) for _ in range(AGREEING)] == [False] * (AGREEING - 1) + [True]
    assert feedback.corrections.pace == pytest.approx(0.8)
    as_measured = simulate(at_pace(MODEL, feedback.corrections.pace), PCIE_GEN5, STAYS)
    assert as_measured.seconds == pytest.approx(0.8 * PREDICTED.seconds)
    feedback.adopted()
    pass_by(feedback, SETTLING)
    assert not any(changes(feedback, [1.0] * SURE, as_measured))


def test_what_was_recorded_on_a_slow_host_may_be_three_times_too_long() -> None:
    feedback = gone_by()
    assert changes(feedback, [0.35] * AGREEING)[-1]
    assert feedback.corrections.pace == pytest.approx(0.35)
    assert changes(feedback, [0.1] * AGREEING)[-1]
    assert feedback.corrections.pace == FASTEST


def test_a_device_at_its_power_limit_is_slower_than_in_a_recording_in_which_it_waited() -> None:
    feedback = gone_by()
    longer = [1.11, 1.12, 1.1, 1.11, 1.12, 1.11, 1.12, 1.11]
    assert changes(feedback, longer) == [False] * (SURE - 1) + [True]
    assert feedback.corrections.pace == pytest.approx(1.1), "by the shortest: the host may have made the others longer"


def test_on_a_host_where_no_two_iterations_agree_half_of_eight_prove_times_too_long() -> None:
    """Predicted were 533 ms, and no step of these took less than 40 ms more or less than that before it."""
    times = [0.95, 0.75, 0.85, 0.75, 0.85, 0.8, 0.9, 1.2]
    feedback = gone_by()
    assert changes(feedback, times) == [False] * (SURE - 1) + [True]
    assert feedback.corrections.pace == pytest.approx(0.85)
    feedback = gone_by()
    assert not any(changes(feedback, [1.0, 0.75, 1.1, 0.8, 1.0, 1.2, 1.1, 1.0])), (
        "a few short ones may have had fewer samples"
    )
    assert feedback.corrections.pace == 1.0


def test_one_iteration_in_eight_that_was_as_short_as_predicted_proves_the_others_late() -> None:
    """The host of a rented GPU is half as fast for a second, and then again what it was."""
    feedback = gone_by()
    assert not any(changes(feedback, [1.1] * 4 + [1.0] + [1.1] * 7))
    assert feedback.corrections.pace == 1.0


def test_lanes_are_corrected_also_while_nobody_knows_whether_iterations_are_late() -> None:
    """The host is late in most of them, and compute waits for a lane in all."""
    feedback, predicted = gone_by(), replace(PREDICTED, busy={**PREDICTED.busy, "h2d": 0.5 * PREDICTED.seconds})
    wait = 0.3 * predicted.seconds
    assert feedback.iteration(IterationTime(1.1 * predicted.seconds + wait, {"h2d": wait}), predicted) is False
    assert feedback.iteration(IterationTime(1.1 * predicted.seconds + wait, {"h2d": wait}), predicted)
    assert feedback.links.h2d < PCIE_GEN5.h2d and feedback.corrections.pace == 1.0


def test_iterations_a_little_longer_or_much_longer_than_predicted_have_another_cause() -> None:
    feedback = gone_by()
    assert not any(changes(feedback, [1 + LATE_PACE / 2] * 2 * SURE))
    assert not any(changes(feedback, [2.0] * 2 * SURE))
    assert feedback.corrections.pace == 1.0


def test_iterations_that_differ_among_themselves_tell_nothing_of_the_pace() -> None:
    feedback = gone_by()
    assert not any(changes(feedback, [1.0, 0.25, 0.9, 0.3])), "batches of several sizes"
    on_two_streams = IterationTime(0.5, {"d2h": 0.4, "h2d": 0.4})
    assert not any(feedback.iteration(on_two_streams, PREDICTED) for _ in range(AGREEING))
    assert feedback.corrections.pace == 1.0


def test_iterations_right_after_a_change_of_plans_tell_nothing_of_the_pace() -> None:
    feedback = Feedback(TARGET, PCIE_GEN5)

    def measured(part: float) -> bool:
        time = IterationTime(part * PREDICTED.seconds, {})
        return feedback.iteration_over(MADE, 0, IterationOutcome(None, TARGET, iteration_time=time))

    for _ in range(2):
        feedback.adopted()
        assert not any([measured(0.5) for _ in range(SETTLING - 1)])
        assert not any([measured(1.0) for _ in range(AGREEING)])
    assert feedback.corrections.pace == 1.0


def test_the_pace_is_corrected_a_few_times_only() -> None:
    feedback, changed = gone_by(), 0
    for _ in range(10):
        changed += any(changes(feedback, [0.9] * AGREEING))
        feedback.adopted()
        pass_by(feedback, SETTLING)
    assert changed == 2


def looked_twice(*lengths: float) -> Feedback:
    """After two looks that each found iterations to be so long, and new plans after each."""
    feedback = gone_by()
    for length in lengths:
        assert any(changes(feedback, [length] * AGREEING))
        feedback.adopted()
        pass_by(feedback, SETTLING)
    return feedback


def test_what_a_slow_host_recorded_is_corrected_once_more_when_the_plans_have_settled() -> None:
    """The first iterations under new plans are long on such a host: two looks left ResNet-152 a fifth too slow."""
    feedback = looked_twice(0.8, 0.9)
    times = [0.93, 0.8, 0.91, 0.9, 0.92, 0.95, 1.1, 0.94]
    assert changes(feedback, times) == [False] * (SURE - 1) + [True]
    assert feedback.corrections.pace == pytest.approx(0.8 * 0.9 * 0.9), (
        "by two that agree: one that is shorter is another"
    )
    feedback.adopted()
    pass_by(feedback, SETTLING)
    assert not any(changes(feedback, [0.5] * 2 * SURE))


def test_the_last_look_is_over_once_it_has_looked() -> None:
    """It stayed open, and two short iterations at the end of an epoch halved the pace for good."""
    feedback = looked_twice(0.9, 0.9)
    assert not any(changes(feedback, [1.0] * 3 * SURE + [0.5] * AGREEING))


def relinked(feedback: Feedback, links: Links) -> Feedback:
    """The same under other links, once the plans for them have settled."""
    feedback.relink(links)
    feedback.adopted()
    pass_by(feedback, SETTLING)
    return feedback


@pytest.mark.parametrize("part", [0.9, 1.1])
def test_a_pace_that_was_borne_out_stays_as_it_is_beside_others(part: float) -> None:
    """Beside processes that decoded JPEGs a plan was made anew twice within half a minute, each begun in a second."""
    feedback = gone_by()
    changes(feedback, [1.0] * SURE)
    feedback = relinked(feedback, BUSY)
    assert not any(changes(feedback, [part] * 2 * SURE))
    feedback = relinked(feedback, BUSIER)
    assert not any(changes(feedback, [part] * 2 * SURE)), "they need more"
    feedback = relinked(relinked(feedback, PCIE_GEN5), BUSY)
    assert not any(changes(feedback, [part] * 2 * SURE)), "they were gone for a few iterations, and came back"
    assert any(changes(relinked(feedback, PCIE_GEN5), [part] * SURE)), "they are gone"


def test_a_pace_that_was_not_borne_out_before_others_came_is_corrected_beside_them() -> None:
    """Such as that of a program whose input pipeline keeps the cores busy from its first step."""
    feedback = gone_by()
    changes(feedback, [1.0] * (SURE - 1))
    feedback = relinked(feedback, BUSY)
    assert not any(changes(feedback, [1.0] * SURE)), "which bears it out beside these alone"
    assert any(changes(relinked(feedback, BUSIER), [0.9] * AGREEING))


def test_laps_beside_others_bear_nothing_out_where_the_plans_stay_without_them() -> None:
    feedback = relinked(gone_by(), BUSY)
    changes(feedback, [1.0] * SURE)
    feedback.relink(PCIE_GEN5)
    feedback.budget.stayed()
    pass_by(feedback, SETTLING)
    assert not any(changes(feedback, [1.0]))
    assert any(changes(relinked(feedback, BUSY), [0.8] * AGREEING))


def test_laps_that_have_corrected_the_pace_have_not_borne_it_out() -> None:
    feedback = gone_by()
    assert changes(feedback, [1 + 2 * LATE_PACE] * SURE)[-1]
    assert any(changes(relinked(feedback, BUSY), [0.9] * AGREEING))


def test_nothing_is_borne_out_of_what_was_recorded_since() -> None:
    feedback = gone_by()
    changes(feedback, [1.0] * SURE)
    feedback.news()
    assert any(changes(relinked(feedback, BUSY), [0.7] * AGREEING))


def test_lanes_that_are_late_beside_others_are_slower_whatever_the_pace() -> None:
    feedback = gone_by()
    changes(feedback, [1.0] * SURE)
    feedback = relinked(feedback, BUSY)
    predicted, late = all_moves(BUSY)
    time = IterationTime(2 * predicted.seconds, late)
    assert [feedback.iteration(time, predicted) for _ in range(AGREEING)] == [False] * (AGREEING - 1) + [True]
    assert feedback.links.h2d == pytest.approx(BUSY.h2d / 2)


def test_plans_are_settled_once_as_many_laps_as_may_correct_them_did_not() -> None:
    feedback = gone_by()
    changes(feedback, [1.0] * (SURE - 1))
    assert not feedback.settled
    changes(feedback, [1.0])
    assert feedback.settled
    feedback.adopted()
    assert not feedback.settled


def test_plans_are_settled_after_some_iterations_where_no_times_are_to_be_had() -> None:
    assert not gone_by(UNTIMED - 1).settled
    assert gone_by(UNTIMED).settled


# -------------------------------------------------------------------------------------------- the host


def host_takes(host: float, device: float = 1.0) -> tuple[Trace, Plan, Simulated]:
    """An iteration of three positions whose first one takes the host all its time, and its plan."""
    trace = Trace((Site("a:0", 0, 10, 0, (1,)),), 2, others=(0,) * 3).on(Clocks((device,) * 3, (0.0, host, host)))
    plan = make_plan("test", trace, (), 1000)
    return trace, plan, simulate(trace, PCIE_GEN5, plan)


def test_a_run_that_begins_with_plans_of_one_that_never_timed_its_host_does_so_itself() -> None:
    feedback, (_, plan, predicted) = Feedback(TARGET, PCIE_GEN5), host_takes(3.0)
    feedback.resume(Feedback(TARGET, PCIE_GEN5).corrections)
    for seconds in (6.0, 4.0, 9.0, 5.0):
        feedback.host(HostTime(seconds, 1.0), plan, predicted)
    assert feedback.corrections.host_pace == pytest.approx(0.5)


def test_the_host_needs_no_more_than_its_shortest_iteration_took_without_us() -> None:
    feedback, (trace, plan, predicted) = Feedback(TARGET, PCIE_GEN5), host_takes(3.0)
    took = [feedback.host(HostTime(seconds, 1.0), plan, predicted) for seconds in (6.0, 4.0, 9.0, 5.0)]
    assert took == [False, False, False, True]
    corrected = feedback.corrected(trace).clocks
    assert corrected is not None
    assert list(corrected.host) == pytest.approx([0.0, 1.5, 1.5])
    assert corrected.hooks * 3 == pytest.approx(1.0)
    assert not feedback.host(HostTime(1.0, 0.5), plan, predicted), "once"


def test_iterations_right_after_a_change_of_plans_tell_nothing_of_the_host() -> None:
    feedback, (_, plan, predicted) = Feedback(TARGET, PCIE_GEN5), host_takes(3.0)
    made = (PlannedIteration(plan, predicted),)
    time, paces = IterationTime(6.0, {}), []
    for seconds in [2.0] * (SETTLING - 1) + [4.0] * HOSTS:
        host = HostTime(seconds, 0.0)
        feedback.iteration_over(made, 0, IterationOutcome(None, TARGET, iteration_time=time, host=host))
        paces.append(feedback.corrections.host_pace)
    assert paces == [1.0] * (SETTLING + HOSTS - 2) + [pytest.approx(4 / 6)]


def test_a_later_plan_s_iterations_may_show_that_the_program_needs_less_of_the_host_never_more() -> None:
    feedback, (trace, plan, _), paces = Feedback(TARGET, PCIE_GEN5), host_takes(30.0), []
    for seconds in (45.0, 30.0, 50.0):
        for _ in range(HOSTS):
            feedback.host(HostTime(seconds, 0.0), plan, simulate(feedback.corrected(trace), feedback.links, plan))
        feedback.adopted()
        paces.append(feedback.corrections.host_pace)
    assert paces == pytest.approx([0.75, 0.5, 0.5])


def test_a_look_at_a_plan_that_was_made_before_a_correction_corrects_no_more_than_was_measured() -> None:
    """As of plans that come back once nobody else needs the memory bus: their prediction is of what was recorded."""
    feedback, (_, plan, recorded), paces = Feedback(TARGET, PCIE_GEN5), host_takes(30.0), []
    for seconds, ours in ((30.0, 0.0), (30.0, 0.0), (1.0, 1.0)):
        for _ in range(HOSTS):
            feedback.host(HostTime(seconds, ours), plan, recorded)
        feedback.adopted()
        paces.append(feedback.corrections.host_pace)
    assert paces == [0.5, 0.5, 0.0]


def test_where_the_device_waits_for_the_host_iterations_say_nothing_of_the_device() -> None:
    feedback, (*_, predicted) = gone_by(), host_takes(30.0)
    assert not any([feedback.iteration(IterationTime(40.0, {}), predicted) for _ in range(2 * SURE)])
    assert feedback.corrections.pace == 1.0


def test_what_a_plan_costs_the_host_is_what_its_hooks_took_by_what_they_did() -> None:
    clocks = Clocks((1.0,) * 5, (0.0, *(3.0,) * 4))
    sites = (Site("a:0", 0, MiB, 0, (3,)), Site("b:0", 1, MiB, 1, (2,)))
    recipes = {1: Recipe("Gelu", (0,), 1e-3, host=0.25)}
    trace = Trace(sites, 4, others=(0,) * 5, recipes=recipes).on(clocks)
    plan = make_plan("test", trace, {0}, 4 * MiB, dropped={1})
    feedback = Feedback(TARGET, PCIE_GEN5)
    hooks = HookTime(stays=0.5, moves=0.125, remade=0.75, groups=2.0)
    for _ in range(HOSTS):
        feedback.host(HostTime(15.0, 3.5, hooks=hooks), plan, simulate(trace, feedback.links, plan))
    assert feedback.links.calls == Calls(group=2.0, moved=0.125, remade=pytest.approx(0.5))  # besides its operators
    told = simulate(feedback.corrected(trace), feedback.links, plan)
    assert told.calls == pytest.approx(0.125 + 0.75 + 2.0)
    assert feedback.corrections.hooks == pytest.approx(3.5 - 0.125 - 0.75 - 2.0)


def test_a_short_iteration_says_nothing_of_the_device_before_the_host_s_time_is_known() -> None:
    feedback, (trace, plan, predicted) = Feedback(TARGET, PCIE_GEN5), host_takes(30.0)
    made, changed = (PlannedIteration(plan, predicted),), 0
    for _ in range(2 * SURE):
        if feedback.iteration_over(
            made, 0, IterationOutcome(None, TARGET, iteration_time=IterationTime(40.0, {}), host=HostTime(40.0, 0.0))
        ):
            changed += 1
            made = (PlannedIteration(plan, simulate(feedback.corrected(trace), feedback.links, plan)),)
            feedback.adopted()
    assert changed == 1
    assert feedback.corrections.pace == 1.0
    assert feedback.corrections.host_pace == pytest.approx(2 / 3)


@pytest.mark.parametrize("why", ["pressed", "resized"])
@pytest.mark.parametrize(("takes", "pace"), [(0.25, pytest.approx(0.3)), (0.5, pytest.approx(0.5)), (1.1, 1.0)])
def test_an_iteration_that_flushed_or_had_another_size_tells_the_pace_where_it_was_shorter(
    takes: float, pace: float, why: str
) -> None:
    """Shapes that change leave fragments, in every iteration: one of 110 ms was taken to need 420, as recorded."""
    feedback, time = Feedback(TARGET, PCIE_GEN5), IterationTime(takes * PREDICTED.seconds, {})
    for _ in range(SETTLING + 1):
        feedback.iteration_over(MADE, 0, IterationOutcome(None, TARGET))
    outcome = replace(IterationOutcome(None, TARGET, iteration_time=time), **{why: True})
    assert any([feedback.iteration_over(MADE, 0, outcome) for _ in range(SURE)]) == (takes < 1)
    assert feedback.corrections.pace == pace


def test_where_the_allocator_flushes_a_few_short_iterations_say_nothing_of_the_pace() -> None:
    """Long ones are no evidence there, so that two short ones of many halved the pace for good."""
    feedback = Feedback(TARGET, PCIE_GEN5)
    for iteration in range(200):
        time = IterationTime((0.5 if iteration % 5 == 0 else 1.0) * PREDICTED.seconds, {})
        feedback.iteration_over(MADE, 0, IterationOutcome(None, TARGET, pressed=True, iteration_time=time))
    assert feedback.corrections.pace == 1.0


def test_a_host_that_waits_for_the_device_is_not_taken_to_need_longer_than_was_recorded() -> None:
    feedback, (trace, plan, predicted) = Feedback(TARGET, PCIE_GEN5), host_takes(1.0, device=2.0)
    for _ in range(HOSTS):
        feedback.host(HostTime(6.1, 0.1), plan, predicted)
    assert feedback.corrected(trace).seconds == trace.seconds
