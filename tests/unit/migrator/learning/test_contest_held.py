"""Contests in the hands of a learner: what else happens to a program while two plans are compared."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from random import Random

import pytest

from tests.unit.rivals import (
    BEFORE,
    BUDGET,
    FIRST,
    HOLDER,
    LATE,
    PERIODS,
    ROUND,
    TRACE,
    policy,
)
from torch_tiers.allocator.sizes import MiB
from torch_tiers.migrator.learning.contest import (
    LAPS,
    PATIENCE,
    TRIES,
    Contest,
)
from torch_tiers.migrator.learning.feedback import SETTLING, UNTOLD
from torch_tiers.migrator.learning.learner import PATIENCE as PATIENCE_FOR_STEPS
from torch_tiers.migrator.learning.learner import Learner
from torch_tiers.migrator.learning.made import Made
from torch_tiers.migrator.learning.orders import Job
from torch_tiers.migrator.links import HARDLY, MEASURED, PCIE_GEN5, Costs, Links
from torch_tiers.migrator.plan import NoPlanFits, Plan
from torch_tiers.migrator.timing import Lap
from torch_tiers.migrator.trace import Trace

pytestmark = pytest.mark.usefixtures("loud")


class Program:
    """Periods of one learner, whose laps come so many periods late."""

    def __init__(self, learner: Learner, seconds: Callable[[Plan], float], late: int = LATE) -> None:
        self.learner = learner
        self.seconds = seconds
        self.laps = [1.0] * late
        self.plans: list[Plan] = []  # that each period had, as far as there was one
        learner.period_over(TRACE, 0, whole=True, pressed=False, drifted=False)

    def period(self, *, drifted: bool = False, pressed: bool = False, overflow: int = 0, peak: int = BUDGET) -> bool:
        (plan,) = self.learner.plans
        self.plans.append(plan)
        self.laps.append(self.seconds(plan))
        lap = Lap(self.laps.pop(0), {}, age=len(self.laps))
        trace = TRACE if self.learner.records_next else None
        return self.learner.period_over(
            trace,
            peak,
            whole=True,
            pressed=pressed,
            drifted=drifted,
            overflow=overflow,
            lap=lap if trace is None else None,
        )

    def run(self, periods: int = PERIODS) -> list[str]:
        """Which plans there were, one after the other."""
        for _ in range(periods):
            self.period()
        return self.story()

    def story(self) -> list[str]:
        names = ["moves" if plan.moved_bytes else "recomputes" for plan in self.plans]
        return [name for k, name in enumerate(names) if k == 0 or name != names[k - 1]]

    def until_rival(self) -> None:
        for _ in range(PERIODS):
            if self.period():
                break
        assert self.moves

    @property
    def moves(self) -> bool:
        (plan,) = self.learner.plans
        return plan.moved_bytes > 0


def learner(**more: object) -> Learner:
    return Learner(policy, BUDGET, weighs_costs=True, **more)  # type: ignore[arg-type]


def takes(recomputing: float, moving: float) -> Callable[[Plan], float]:
    assert HOLDER.predicted is not None
    step = HOLDER.predicted.seconds
    return lambda plan: step * (moving if plan.moved_bytes else recomputing)


def test_the_faster_plan_stays_that_of_the_rival(caplog: pytest.LogCaptureFixture) -> None:
    program = Program(learner(), takes(1.0, 0.99))
    with caplog.at_level("INFO", logger="tiers"):
        assert program.run() == ["recomputes", "moves"]
    (line,) = (text for text in caplog.messages if text.startswith("contest"))
    assert line.count(" ms a period") == 2 and "36.0 MiB" in line and line.endswith("the rival takes its place")
    assert program.learner.settled


@pytest.mark.parametrize(("moving", "story"), [(0.996, ["moves"]), (1.0, []), (1.004, [])])
def test_on_a_card_that_gets_warm_the_faster_plan_is_told_all_the_same(moving: float, story: list[str]) -> None:
    """By 2% in 60 periods, as an H100 with a GPT does: a rival that was faster by less than that never stayed."""
    program = Program(learner(), lambda plan: 0.0)
    steady = takes(1.0, moving)
    program.seconds = lambda plan: steady(plan) * (1 + 0.02 * min(1, len(program.plans) / 60))
    assert program.run() == ["recomputes", "moves", "recomputes", *story]
    assert program.learner.settled


def test_the_faster_plan_stays_that_of_the_holder_without_its_being_made_again() -> None:
    asked: list[Costs] = []

    def counted(trace: Trace, budget: int, links: Links) -> Plan:
        asked.append(links.costs)
        return policy(trace, budget, links)

    program = Program(Learner(counted, BUDGET, weighs_costs=True), takes(1.0, 0.999))
    assert program.run() == ["recomputes", "moves", "recomputes"]
    assert asked == [MEASURED, HARDLY]
    assert program.plans[-1] is program.plans[0]


@pytest.mark.parametrize("late", [0, 1, SETTLING, 2 * SETTLING, LAPS])
def test_no_lap_of_one_plan_counts_for_the_other(late: int) -> None:
    """The last periods of the holder are short, and come when the rival is carried out already.

    A host may be far ahead of its device.
    """
    program = Program(learner(), takes(1.0, 1.0), late)
    program.until_rival()
    program.laps = [0.9 * seconds for seconds in program.laps]
    assert program.run() == ["recomputes", "moves", "recomputes"]


def test_both_have_the_same_number_of_periods() -> None:
    program = Program(learner(), takes(1.0, 1.01))
    program.run()
    periods = sum(bool(plan.moved_bytes) for plan in program.plans)
    assert periods == FIRST
    assert program.plans.index(next(plan for plan in program.plans if plan.moved_bytes)) == BEFORE


def test_the_holder_s_laps_are_those_after_its_rival_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """To make it takes processors of the host; and that may be faster or slower than it was before."""
    jobs: list[tuple[Job, Future[tuple[Made, ...]]]] = []

    def later(job: Job) -> Future[tuple[Made, ...]]:
        jobs.append((job, Future()))
        return jobs[-1][1]

    def work() -> None:
        job, future = jobs[-1]
        future.set_result(pickle.loads(pickle.dumps(job))())  # as for a process of its own

    monkeypatch.setattr(
        "torch_tiers.migrator.learning.orders.AT_ONCE", 0
    )  # sites: this trace is planned for beside the program, too
    speed = 1.0
    program = Program(learner(submit=later), lambda plan: speed * takes(1.0, 1.0)(plan))
    work()
    program.learner.period_over(None, BUDGET, whole=True, pressed=False, drifted=False)
    program.run(FIRST)
    assert program.learner.planning and not program.learner.settled
    program.run(LAPS)
    work()
    speed = 0.98
    assert program.run() == ["recomputes", "moves", "recomputes"], "at the same speed it is no faster"


def test_there_is_one_contest_until_the_program_is_another_one() -> None:
    program = Program(Learner(policy, 2 * BUDGET, weighs_costs=True), takes(1.0, 1.01))
    assert program.run() == ["recomputes", "moves", "recomputes"]
    assert program.run() == ["recomputes", "moves", "recomputes"]
    larger = replace(TRACE, sites=tuple(replace(site, nbytes=site.nbytes + 1) for site in TRACE.sites))
    program.period(drifted=True)
    while program.learner.records_next:
        program.learner.period_over(larger, BUDGET, whole=True, pressed=False, drifted=False)
    assert program.run()[3:] == ["moves", "recomputes"]


def test_news_of_the_program_ends_it_and_the_rival_is_not_planned_for() -> None:
    program = Program(learner(), takes(1.0, 0.99))
    program.until_rival()
    program.learner.period_over(TRACE, BUDGET, whole=True, pressed=False, drifted=True)  # nothing that is new
    other = replace(TRACE, sites=tuple(replace(site, key=f"other.{site.key}") for site in TRACE.sites))
    assert program.learner.period_over(other, BUDGET, whole=True, pressed=False, drifted=False)
    assert [plan.moved_bytes for plan in program.learner.plans] == [0, 0]


def test_after_the_rival_won_plans_are_made_with_its_costs() -> None:
    program = Program(learner(), takes(1.0, 0.99))
    program.run()
    assert program.moves
    assert program.learner.relink(replace(PCIE_GEN5, h2d=20e9))
    assert program.moves


def test_what_a_rival_won_with_on_a_free_bus_is_not_planned_with_where_others_need_it() -> None:
    program = Program(learner(), takes(1.0, 0.99))
    program.run()
    assert program.learner.relink(replace(PCIE_GEN5, usual=PCIE_GEN5))
    assert not program.moves
    assert program.learner.relink(PCIE_GEN5)
    assert program.moves


def test_what_a_rival_won_with_tells_what_the_fastest_plan_takes_without_these_others() -> None:
    """A plan for a loaded bus was to be 1.7% slower than that, and was 2.9%: its moves had been taken to be dear."""
    seen: list[Links] = []

    def watching(trace: Trace, budget: int, links: Links) -> Plan:
        seen.append(links)
        return policy(trace, budget, links)

    program = Program(Learner(watching, BUDGET, weighs_costs=True), takes(1.0, 0.99))
    program.run()
    program.learner.relink(PCIE_GEN5.reduced({"bus": 0.9}))
    assert (seen[-1].costs, seen[-1].alone.costs) == (MEASURED, HARDLY)


def test_while_others_need_the_memory_bus_there_is_no_contest() -> None:
    contended = replace(PCIE_GEN5, usual=PCIE_GEN5)
    program = Program(learner(), takes(1.0, 0.99))
    program.learner.relink(contended)
    assert program.run() == ["recomputes"]
    assert program.learner.settled
    program.learner.relink(PCIE_GEN5)
    program.until_rival()
    assert program.learner.relink(contended)
    assert not program.moves
    assert program.run()[-1] == "recomputes"


@pytest.mark.parametrize("stays", [False, True])
def test_the_holder_is_back_before_it_is_planned_anew(stays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rival moves more, and others need the memory bus now; to plan takes seconds.

    A holder that moves nothing is not planned anew at all: it takes nothing of the bus.
    """
    program = Program(learner(submit=lambda job: Future()), takes(1.0, 0.99))
    program.until_rival()
    monkeypatch.setattr("torch_tiers.migrator.learning.orders.AT_ONCE", 0)
    if not stays:
        monkeypatch.setattr("torch_tiers.migrator.learning.standby.is_quiet", lambda *_: False)
    assert program.learner.relink(replace(PCIE_GEN5, usual=PCIE_GEN5))
    assert program.learner.planning != stays and not program.moves


def test_a_race_that_was_broken_off_is_run_again_a_few_times() -> None:
    contended = replace(PCIE_GEN5, usual=PCIE_GEN5)
    program = Program(learner(), takes(1.0, 0.99))
    for _ in range(TRIES):
        program.until_rival()
        program.learner.relink(contended)
        program.run(SETTLING)
        program.learner.relink(PCIE_GEN5)
    assert program.run()[-1] == "recomputes"
    assert program.learner.settled


def test_while_a_rival_is_tried_the_program_s_plan_is_the_holder_s() -> None:
    program = Program(learner(), takes(1.0, 0.99))
    program.until_rival()
    program.learner.finish()
    assert program.moves and program.learner.racing
    assert not any(plan.moved_bytes for plan in program.learner.lasting)
    program.run()
    assert all(plan.moved_bytes for plan in program.learner.lasting)


def test_a_holder_that_came_back_where_no_plan_fits_is_carried_out() -> None:
    """What carries plans out must not go on with the rival's."""

    def refuses(trace: Trace, budget: int, links: Links) -> Plan:
        if links.h2d < PCIE_GEN5.h2d:
            raise NoPlanFits(budget, 2 * budget, "everything")
        return policy(trace, budget, links)

    program = Program(Learner(refuses, BUDGET, weighs_costs=True), takes(1.0, 0.99))
    program.until_rival()
    told = [program.learner.relink(replace(PCIE_GEN5, h2d=slower)) for slower in (2e9, 1e9)]
    assert not program.moves
    assert any(told) or program.period()


def test_a_rival_that_takes_for_ever_to_make_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_tiers.migrator.learning.contest.MAKING", 50)
    contest = Contest(MEASURED, lambda costs: Future())
    for _ in range(ROUND + 60):
        contest.period_over(HOLDER, Lap(1.0, {}))
    assert contest.is_over and not contest.planning


def test_a_program_that_makes_no_optimizer_step_settles_too() -> None:
    """Waits are timed until then, for six microseconds each."""
    without = Learner(policy, 2 * BUDGET)
    for period in range(4 * UNTOLD):
        without.period_over(
            TRACE if period < PATIENCE_FOR_STEPS else None, 0, whole=False, pressed=False, drifted=False
        )
    assert without.settled and not without.complete


def test_with_two_kinds_of_periods_there_is_no_contest() -> None:
    of_two = learner()
    other = replace(TRACE, sites=tuple(replace(site, key=f"other.{site.key}") for site in TRACE.sites))
    for trace in (TRACE, other):
        of_two.period_over(trace, 0, whole=True, pressed=False, drifted=False)
    lap = Lap(takes(1.0, 1.0)(of_two.plans[0]), {})
    args = {"whole": True, "pressed": False, "drifted": False, "lap": lap}
    assert not any(of_two.period_over(None, BUDGET, **args) for _ in range(PERIODS))  # type: ignore[arg-type]
    assert of_two.settled


def test_without_laps_there_is_no_contest_and_plans_settle() -> None:
    without = learner()
    without.period_over(TRACE, 0, whole=True, pressed=False, drifted=False)
    changed = [without.period_over(None, BUDGET, whole=True, pressed=False, drifted=False) for _ in range(PATIENCE)]
    assert not any(changed)
    assert without.settled


def test_a_policy_that_weighs_no_costs_has_no_rival() -> None:
    program = Program(Learner(policy, BUDGET), takes(1.0, 0.99))
    assert program.run() == ["recomputes"]


@pytest.mark.parametrize("what", [{"pressed": True}, {"overflow": MiB}, {"peak": 2 * BUDGET}])
def test_a_rival_for_which_hbm_is_too_small_is_gone_at_once(what: dict[str, int]) -> None:
    program = Program(learner(), takes(1.0, 0.99))
    program.until_rival()
    for _ in range(SETTLING):
        program.period()
    assert program.moves
    assert program.period(**what)  # type: ignore[arg-type]
    assert not program.moves
    assert program.run()[-1] == "recomputes"


def test_a_rival_from_which_the_program_departs_is_gone_at_once() -> None:
    program = Program(learner(), takes(1.0, 0.99))
    program.until_rival()
    assert program.period(drifted=True)
    assert not program.moves
    assert program.run()[-1] == "recomputes"


def test_what_a_rival_takes_corrects_nothing_before_it_has_won() -> None:
    program = Program(learner(), takes(1.0, 0.9))
    program.until_rival()
    assert not any(program.period() for _ in range(ROUND))
    assert program.learner.complete and program.moves


def test_while_a_rival_is_tried_nothing_is_settled() -> None:
    program = Program(learner(), takes(1.0, 1.4))
    assert HOLDER.predicted is not None
    changed, settled = [], []
    for _ in range(BEFORE + 2 * ROUND):
        changed.append(program.period())
        settled.append(program.learner.settled)
    assert sum(changed) == 2
    assert settled == sorted(settled) and settled[-1]
    assert settled.index(True) >= BEFORE + ROUND


@pytest.mark.parametrize(("moving", "fewest", "most"), [(0.99, 7, 20), (1.0, 0, 2), (1.01, 0, 2)])
def test_on_a_host_that_is_fast_and_slow_by_turns_the_faster_plan_stays(
    moving: float, fewest: int, most: int, seed: int
) -> None:
    """Of 30,000 stories it does in 85 of 100, and the slower one in 1 of 1,500: such bounds are missed once in 10^6."""
    rng = Random(seed)

    def seconds(plan: Plan) -> float:
        return takes(1.0, moving)(plan) * rng.choice([1.0, 1.0, 1.0, 1.5, 1.9])

    stories = [Program(learner(), seconds).run()[-1] for _ in range(20)]
    assert fewest <= stories.count("moves") <= most


@pytest.mark.parametrize("racing", [False, True])
def test_a_contest_waits_while_groups_are_held_back(racing: bool) -> None:
    """No laps come then: after 24 periods without, the rival had lost for good, or there never was a contest."""
    program = Program(learner(), takes(1.0, 0.99))
    if racing:
        program.until_rival()
    program.learner.rearranged(held_back=True)
    before = program.learner.plans
    for _ in range(2 * PATIENCE):
        assert not program.learner.period_over(None, BUDGET, whole=True, drifted=False, pressed=False)
    assert program.learner.plans == before
    program.learner.rearranged(held_back=False)
    program.run()
    assert program.learner.settled
    assert program.learner.plans[0].moved_bytes, "it was won by what is faster"


def test_a_plan_that_is_owed_is_told_of_when_what_was_set_aside_comes_back() -> None:
    """The holder is back although no plan fits: what carries plans out is told of it once."""

    def refuses(trace: Trace, budget: int, links: Links) -> Plan:
        if links.contended:
            raise NoPlanFits(budget, 2 * budget, "all")
        return policy(trace, budget, links)

    program = Program(Learner(refuses, BUDGET, weighs_costs=True), takes(1.0, 0.99))
    program.until_rival()
    rival = program.learner.plans
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("torch_tiers.migrator.learning.standby.is_quiet", lambda *_: False)
        told = program.learner.relink(replace(PCIE_GEN5, usual=PCIE_GEN5))
    assert program.learner.plans != rival
    assert program.learner.relink(PCIE_GEN5) != told
    assert not program.learner.relink(PCIE_GEN5), "once"
