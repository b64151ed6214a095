"""Weights that may lie in DRAM, on a core without a GPU."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.unit.one_core import OnOneCore, step
from torch_tiers.allocator.layout.residence import PATIENCE, RARELY, Residence
from torch_tiers.allocator.native import DRAM, HBM, Core
from torch_tiers.allocator.native.core import off_sequence
from torch_tiers.allocator.sizes import MiB

GPU = torch.device("cuda", 0)
NBYTES = 8 * MiB


@pytest.fixture
def weights(pages: OnOneCore, core: Core) -> list[int]:
    return [core.allocate(NBYTES) for _ in range(4)]


@pytest.fixture
def residence(pages: OnOneCore, weights: list[int]) -> Residence:
    pages.more(64 * MiB)
    found = pages.residence(GPU)
    assert found is not None
    found.set_weights(lambda: dict.fromkeys(weights, NBYTES))
    return found


@pytest.fixture
def state(pages: OnOneCore, core: Core) -> int:
    """State that lies in DRAM, as the first period begins."""
    pages.more(64 * MiB)
    core.state(True, most_hbm=0)
    address = core.allocate(NBYTES)
    core.state(False)
    pages.begin()
    return address


def test_weights_are_placed_where_they_are_said_to_lie(residence: Residence, core: Core, weights: list[int]) -> None:
    residence.place(weights[:2], weights[2:])
    assert [residence.in_dram(weight) for weight in weights] == [True, True, False, False]
    residence.place(weights[2:3], weights[:1])
    assert [residence.in_dram(weight) for weight in weights] == [False, True, True, False]


def test_of_a_block_that_lies_on_both_tiers_it_is_known_what_hbm_has(residence: Residence, core: Core) -> None:
    core.limit(HBM, core.counts().hbm + 48 * MiB)
    block = core.allocate(64 * MiB)
    in_hbm = core.on(block, HBM)
    assert 0 < in_hbm < 64 * MiB, "it does not lie on both"
    first, nbytes = residence.longest_in_hbm(block, 64 * MiB)
    assert nbytes == in_hbm and core.pages_on(block + first, nbytes, DRAM) == 0
    other = core.allocate(4 * MiB)
    assert residence.longest_in_hbm(other, 4 * MiB) == (0, 0)
    core.free(block)
    assert residence.longest_in_hbm(core.allocate(4 * MiB), 4 * MiB) == (0, 4 * MiB)


def test_state_that_was_loaded_makes_room_at_once(pages: OnOneCore, core: Core) -> None:
    pages.more(64 * MiB)
    core.state(True)
    blocks = [core.allocate(NBYTES) for _ in range(4)]
    core.state(False)
    residence = pages.residence(GPU)
    assert residence is not None and pages.state_in_dram == 0
    assert residence.state_blocks() == set(blocks)
    assert residence.demotable() == 4 * NBYTES
    assert residence.make_room(NBYTES + 1) == 0
    assert residence.demotable() == 2 * NBYTES
    assert sum(residence.in_dram(block) for block in blocks) == 2
    assert pages.state_in_dram == 2 * NBYTES, "it is known before a period has ended"
    assert residence.make_room(3 * NBYTES) == 1 * NBYTES, "no more of it is in HBM"


def test_state_that_is_streamed_is_not_read_where_it_lies(pages: OnOneCore, core: Core, state: int) -> None:
    residence = pages.residence(GPU)
    assert residence is not None

    def over(times: int) -> tuple[int, int, bool]:
        step(core, 4 * MiB)
        for _ in range(times):
            residence.note_streamed({state: residence.dram_bytes(state)})
        pages.period_over()
        return residence.state, residence.in_place, residence.spilled

    assert over(0) == (NBYTES, NBYTES, True)
    other = 2  # steps in a period, as of a model that is trained more often than another
    assert over(other) == (NBYTES, 0, False)
    assert over(0) == (NBYTES, 0, False), "a scaler has refused the step"


def test_weights_in_dram_are_not_taken_for_what_hbm_has_no_room_for(
    pages: OnOneCore, residence: Residence, weights: list[int], core: Core
) -> None:
    residence.place(weights, ())
    core.limit(HBM, core.counts().hbm + 8 * MiB)
    pages.begin()
    for _ in range(2):
        step(core, 4 * MiB)
        pages.period_over()
        assert pages.overflow(GPU).nbytes == 0
        assert not pages.spilled(GPU)


def test_weights_are_promoted_where_a_step_leaves_room(
    pages: OnOneCore, residence: Residence, weights: list[int], core: Core
) -> None:
    residence.place(weights, ())
    pages.begin()
    step(core, 4 * MiB)
    pages.period_over()
    assert sum(core.on(weight, HBM) for weight in weights) >= NBYTES


def test_weights_are_demoted_after_the_first_step_that_needs_their_room(
    pages: OnOneCore, residence: Residence, weights: list[int], core: Core
) -> None:
    """What lies in DRAM in their place is read over the link many times."""
    pages.begin()
    step(core, 24 * MiB, 24 * MiB)
    pages.period_over()
    assert sum(core.on(weight, DRAM) for weight in weights) >= NBYTES
    step(core, 24 * MiB, 24 * MiB)
    pages.period_over()
    assert pages.overflow(GPU).nbytes == 0


def test_no_state_is_promoted_where_hbm_has_no_room_for_the_rest(pages: OnOneCore, core: Core, state: int) -> None:
    for _ in range(PATIENCE - 1):
        step(core, 24 * MiB, 48 * MiB)
        pages.period_over()
    assert pages.overflow(GPU).nbytes > 0
    assert core.on(state, HBM) == 0


def test_state_comes_back_to_pages_that_lie_idle_beside_the_layout(pages: OnOneCore, core: Core, state: int) -> None:
    """Requests that found their place taken have left them mapped, and none of them is needed again."""
    for _ in range(2):
        step(core, 16 * MiB, 8 * MiB)
        pages.period_over()
    with off_sequence():
        step(core, 60 * MiB)
    for _ in range(2 * PATIENCE):
        step(core, 16 * MiB, 8 * MiB)
        pages.period_over()
    assert core.on(state, HBM) == NBYTES
    assert pages.overflow(GPU).nbytes == 0


@pytest.mark.parametrize("long", [100, 1000])
def test_state_comes_back_soon_after_there_is_room_however_long_there_was_none(
    pages: OnOneCore, core: Core, state: int, long: int
) -> None:
    core.limit(HBM, 28 * MiB)
    for _ in range(long):
        step(core, 16 * MiB, 8 * MiB)
        pages.period_over()
    assert core.on(state, HBM) == 0
    core.limit(HBM, 64 * MiB)
    for _ in range(RARELY):
        step(core, 16 * MiB, 8 * MiB)
        pages.period_over()
    assert core.on(state, HBM) == NBYTES


def test_no_state_is_demoted_while_plans_are_made_that_may_need_less(pages: OnOneCore, core: Core) -> None:
    """It lay in DRAM to the end of a run, for 152 MiB that the plan after it did not need."""
    pages.more(64 * MiB)
    pages.state(True)
    state = core.allocate(NBYTES)
    pages.state(False)
    pages.begin()
    for _ in range(2 * PATIENCE):
        step(core, 24 * MiB, 40 * MiB)
        pages.period_over(planning=True)
    assert pages.overflow(GPU).nbytes > 0
    assert core.on(state, HBM) == NBYTES
    step(core, 24 * MiB, 40 * MiB)
    pages.period_over()
    assert core.on(state, HBM) == 0


def test_what_state_lay_in_dram_is_known_after_the_program_has_freed_it(
    pages: OnOneCore, core: Core, state: int
) -> None:
    """A run's numbers are taken when the program is over, and said that none did."""
    step(core, 24 * MiB, 8 * MiB)
    pages.period_over()
    core.free(state)
    assert core.counts().demoted == 0
    assert pages.state_in_dram == NBYTES


def test_periods_are_counted_as_what_did_not_fit_is_told_once_for_each(pages: OnOneCore, core: Core) -> None:
    pages.begin()
    for number in range(3):
        assert pages.periods == number
        step(core, 24 * MiB, 8 * MiB)
        pages.period_over()


def test_state_that_came_back_in_vain_waits_longer_each_time(pages: OnOneCore, core: Core) -> None:
    """A program that empties its cache in each step has spare room whenever it is looked at."""
    pages.state(True)
    state = core.allocate(NBYTES)
    pages.state(False)
    pages.more(64 * MiB)
    pages.begin()
    tiers = [HBM]
    for _ in range(40 * PATIENCE):
        needs_much = core.on(state, HBM) > 0
        step(core, 24 * MiB, (36 if needs_much else 8) * MiB)
        core.trim()
        pages.period_over()
        tiers.append(HBM if core.on(state, HBM) else DRAM)
    moves = sum(before != after for before, after in pairwise(tiers))
    assert 3 <= moves <= 12


def test_the_ends_of_weights_are_not_taken_for_what_hbm_has_no_room_for(pages: OnOneCore, core: Core) -> None:
    """A model was loaded where HBM was full, so they came to lie on pages of DRAM, too."""
    core.limit(HBM, core.counts().hbm)
    pages.more(64 * MiB)
    weights = [core.allocate(3 * MiB + 512) for _ in range(4)]
    residence = pages.residence(GPU)
    assert residence is not None
    residence.place(weights, ())
    pages.begin()
    for _ in range(2):
        pages.period_over()
        assert pages.overflow(GPU).nbytes == 0


def test_what_an_earlier_step_has_left_mapped_in_dram_is_no_overflow(core: Core, pages: OnOneCore) -> None:
    """It was taken off the budget, step after step, though nobody used it any more."""
    pages.more(64 * MiB)
    for address in [core.allocate(40 * MiB), core.allocate(40 * MiB)]:
        core.free(address)
    assert core.mark().spilled >= 16 * MiB
    step(core, 8 * MiB)
    now = core.mark()
    assert now.dram > 0
    assert now.spilled == 0


def test_hbm_is_short_where_it_has_no_room_again_and_again(core: Core, pages: OnOneCore) -> None:
    """What happens once in a while is worth no new plans: to record anew takes steps of a second."""
    pages.more(64 * MiB)
    pages.begin()
    short = []
    for most in (40, 8, 40, 40, 40, 8):
        for address in [core.allocate(40 * MiB), core.allocate(most * MiB)]:
            core.free(address)
        pages.period_over()
        short.append(pages.is_short(GPU))
    assert short == [False, False, False, True, True, False]


def test_what_stays_in_hbm_comes_there_with_the_pages_that_it_has_a_part_of(pages: OnOneCore, core: Core) -> None:
    limit = core.counts().hbm_limit
    core.limit(HBM, core.counts().hbm)
    pages.more(64 * MiB)
    small, weight = core.allocate(256 * 1024), core.allocate(NBYTES)
    core.limit(HBM, limit)
    residence = pages.residence(GPU)
    assert residence is not None
    residence.place([weight], [small])
    assert core.on(small, HBM) == 256 * 1024
    assert core.on(weight, DRAM) > NBYTES // 2


def test_weights_that_were_loaded_into_dram_are_not_counted_as_needed(pages: OnOneCore, core: Core) -> None:
    core.limit(HBM, core.counts().hbm)
    pages.more(64 * MiB)
    weight = core.allocate(NBYTES)
    before = core.counts().demoted
    residence = pages.residence(GPU)
    assert residence is not None
    waits = core.counts().waits
    residence.place([weight], ())
    assert core.counts().demoted - before >= NBYTES - 2 * core.page_bytes
    assert core.counts().waits == waits, "nothing had to move"


def test_a_model_that_does_not_train_settles_after_its_first_forward(
    residence: Residence, weights: list[int], core: Core
) -> None:
    residence.place(weights, ())
    residence.pass_over()  # the first one begins
    assert all(core.on(weight, HBM) == 0 for weight in weights)
    step(core, 28 * MiB)
    residence.pass_over()
    assert sum(core.on(weight, HBM) for weight in weights) >= 2 * NBYTES


def test_what_an_evaluation_finds_says_nothing_of_the_periods(
    pages: OnOneCore, residence: Residence, weights: list[int], core: Core
) -> None:
    pages.begin()
    hot = core.allocate(40 * MiB)
    assert core.on(hot, DRAM) > 0
    for _ in range(PATIENCE - 1):
        residence.pass_over()
    assert (pages.overflow(GPU).nbytes, pages.spilled(GPU)) == (0, False)
    core.free(hot)


def test_state_in_dram_is_no_reason_to_demote_weights_of_a_model_that_infers(
    pages: OnOneCore, residence: Residence, weights: list[int], core: Core
) -> None:
    """It trained before, and its optimizer's state lies there."""
    core.state(True, most_hbm=0)
    core.allocate(NBYTES)
    core.state(False)
    assert core.glance().dram_state == NBYTES
    core.limit(HBM, core.counts().hbm)
    for _ in range(PATIENCE):
        residence.pass_over()
    assert all(core.on(weight, DRAM) == 0 for weight in weights)


def test_a_weight_of_which_no_more_can_move_is_not_demoted_again(pages: OnOneCore, core: Core) -> None:
    """Whole pages move, and it begins and ends within some that it shares."""
    core.allocate(3 * MiB)
    weight = core.allocate(NBYTES)
    core.allocate(3 * MiB)
    pages.more(64 * MiB)
    residence = pages.residence(GPU)
    assert residence is not None
    residence.set_weights(lambda: {weight: NBYTES})
    residence.place([weight], ())
    assert 0 < core.on(weight, DRAM) < NBYTES
    core.limit(HBM, core.counts().hbm)
    pages.begin()
    for _ in range(2 * PATIENCE):
        step(core, 32 * MiB)
        waits = core.counts().waits
        assert not residence.period_over(core.glance().dram, alone=True)
        assert core.counts().waits == waits


def test_weights_are_demoted_for_what_a_step_had_in_dram_though_it_is_unmapped_by_now(
    pages: OnOneCore, residence: Residence, weights: list[int], core: Core
) -> None:
    """In a period without a layout all that lies idle is unmapped before the period ends."""
    pages.begin()
    step(core, 24 * MiB, 24 * MiB)
    core.trim()
    pages.period_over()
    assert sum(core.on(weight, DRAM) for weight in weights) >= NBYTES


def test_what_was_promoted_is_not_demoted_for_the_room_that_it_had_in_dram(
    pages: OnOneCore, residence: Residence, weights: list[int], core: Core
) -> None:
    residence.place(weights, ())
    pages.begin()
    in_hbm = [0]
    for _ in range(2 * PATIENCE):
        step(core, 28 * MiB)
        pages.period_over()
        in_hbm.append(sum(core.on(weight, HBM) for weight in weights))
    assert in_hbm == sorted(in_hbm)
    assert in_hbm[1] > 0
