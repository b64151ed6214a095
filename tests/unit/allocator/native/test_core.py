"""The native core on anonymous files: blocks, tiers, pools, counters. No GPU."""

from __future__ import annotations

import contextlib
import ctypes

import numpy as np
import psutil
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from tests.unit.cores import DRAM, FREE, HBM, PAGE, USED, fill, holds, sequence_layout
from torch_tiers.allocator.native import Core, CoreError, CoreFull, off_sequence
from torch_tiers.allocator.sizes import GiB, MiB


def test_blocks_are_aligned_as_pytorch_aligns_them_and_can_be_written(core: Core) -> None:
    addresses = [core.allocate(n) for n in (1, 511, 512, 513, MiB, MiB + 1, 3 * MiB)]
    assert all(address % 512 == 0 for address in addresses)
    for value, address in enumerate(addresses):
        fill(address, 1, value)
    assert [ctypes.string_at(address, 1)[0] for address in addresses] == list(range(7))


def test_what_was_given_back_is_handed_out_again_at_once(core: Core) -> None:
    first = core.allocate(8 * MiB)
    core.free(first)
    assert core.allocate(8 * MiB) == first
    assert core.counts().hbm == 8 * MiB


def test_no_place_is_empty_or_reaches_past_its_range(core: Core) -> None:
    """As an adapter might ask for, which restores a pool's blocks: the first left what was behind it in no block."""
    address = core.allocate(8 * MiB)
    core.free(address)
    before = core.blocks().tobytes()
    assert all(core._library.tn_allocate_at(core._core, address, nbytes, 1) for nbytes in (0, 1 << 41))
    assert core.blocks().tobytes() == before
    assert core._library.tn_allocate_at(core._core, address, MiB, MiB) == 0
    core.free(address)


def test_streams_do_not_share_what_was_given_back(core: Core) -> None:
    first = core.allocate(8 * MiB, stream=1)
    core.free(first)
    assert core.allocate(8 * MiB, stream=2) != first


def test_a_block_used_on_another_stream_comes_back_when_that_is_done(core: Core) -> None:
    block = core.allocate(8 * MiB, stream=1)
    core.used_on(block, stream=2)
    core.free(block)
    assert core.allocate(8 * MiB, stream=1) == block  # without a GPU all work is done when it is given


def test_hbm_comes_first_and_dram_when_it_is_full(core: Core) -> None:
    blocks = [core.allocate(16 * MiB) for _ in range(6)]
    assert [core.on(block, HBM) > 0 for block in blocks] == [True] * 4 + [False] * 2
    counts = core.counts()
    assert (counts.hbm, counts.dram) == (64 * MiB, 32 * MiB)


def test_memory_ends_only_where_every_tier_does(core: Core) -> None:
    for _ in range(8):
        core.allocate(16 * MiB)
    with pytest.raises(CoreFull, match="every tier is full"):
        core.allocate(MiB)


def test_retired_pools_use_up_neither_memory_nor_addresses(core: Core) -> None:
    for pool in range(1, 400):  # twice as many as there are addresses for
        core.free(core.allocate(4 * MiB, pool=pool))
        core.retire(pool)
        core.trim()
    counts = core.counts()
    assert (counts.hbm, counts.maps, counts.unmaps) == (0, 2 * 399, 2 * 399)


def test_a_retired_pool_is_there_as_long_as_something_of_it_is_in_use(core: Core) -> None:
    block = core.allocate(4 * MiB, pool=1)
    core.retire(1)
    core.trim()
    fill(block, 4 * MiB, 7)
    core.free(block)
    core.trim()
    assert core.counts().hbm == 0


def test_a_private_pool_keeps_its_memory_until_it_is_retired(core: Core) -> None:
    core.free(core.allocate(64 * MiB, pool=1))
    block = core.allocate(32 * MiB)
    assert core.on(block, DRAM) == 32 * MiB  # a graph may still replay into the pool's pages
    core.free(block)
    core.trim()
    core.retire(1)
    assert core.on(core.allocate(32 * MiB), HBM) == 32 * MiB


def test_a_block_moves_between_tiers_under_its_address(core: Core) -> None:
    block = core.allocate(12 * MiB)
    fill(block, 12 * MiB, 7)
    core.move(block, DRAM)
    assert core.on(block, DRAM) == 12 * MiB
    assert holds(block, 12 * MiB, 7)
    core.move(block, HBM)
    assert core.on(block, HBM) == 12 * MiB
    assert holds(block, 12 * MiB, 7)


def test_a_block_stays_where_it_is_when_the_other_tier_has_no_room() -> None:
    core = Core("memfd", hbm=16 * MiB, dram=4 * MiB)
    block = core.allocate(12 * MiB)
    fill(block, 12 * MiB, 7)
    with pytest.raises(CoreFull, match="dram is full"):
        core.move(block, DRAM)
    assert holds(block, 12 * MiB, 7)
    core.free(block)
    core.close()


@pytest.mark.parametrize("hbm", [64 * MiB, GiB, 10 * GiB, 80 * GiB])
def test_pages_are_as_large_as_leaves_thousands_of_them(hbm: int) -> None:
    with contextlib.closing(Core("memfd", hbm, dram=0)) as core:
        assert 2 * MiB <= core.page_bytes <= 16 * MiB
        assert core.page_bytes == 2 * MiB or hbm // core.page_bytes >= 2048


def test_state_smaller_than_a_page_moves_with_what_shares_the_page() -> None:
    with contextlib.closing(Core("memfd", hbm=40 * GiB, dram=GiB)) as core:
        core.state(True)
        blocks = [core.allocate(5 * MiB) for _ in range(4)]
        core.state(False)
        for number, block in enumerate(blocks):
            fill(block, 5 * MiB, number)
        for tier in (DRAM, HBM):
            core.move(blocks[1], tier)
            assert core.on(blocks[1], tier) == 5 * MiB
        assert all(holds(block, 5 * MiB, number) for number, block in enumerate(blocks))
        for block in blocks:
            core.free(block)


def test_freeing_what_is_not_in_use_is_an_error(core: Core) -> None:
    block = core.allocate(MiB)
    core.free(block)
    for address in (block, block + 512, 12345):
        with pytest.raises(CoreError, match="nothing in use"):
            core.free(address)


def test_a_request_larger_than_all_tiers_is_refused_and_leaves_nothing(core: Core) -> None:
    with pytest.raises(CoreFull):
        core.allocate(GiB)
    assert core.counts().allocated == 0
    core.allocate(64 * MiB)


def test_a_limit_that_is_lowered_holds_for_what_comes(core: Core) -> None:
    core.limit(HBM, 8 * MiB)
    core.allocate(8 * MiB)
    assert core.on(core.allocate(8 * MiB), DRAM) == 8 * MiB


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(CoreError, match="no such backend"):
        Core("rocm", hbm=MiB, dram=0)


def test_a_request_of_all_that_can_be_counted_finds_every_tier_full() -> None:
    core = Core("memfd", hbm=64 * MiB, dram=0)
    for nbytes in (2**64 - 1, 2**63, 2**61):
        with pytest.raises(CoreFull):
            core.allocate(nbytes)
    core.close()


def test_many_streams_leave_addresses_to_others() -> None:
    """Each heap reserved a terabyte: at the 69th stream the process had no addresses left."""
    before = psutil.Process().memory_info().vms
    core = Core("memfd", hbm=512 * MiB, dram=0)
    blocks = [core.allocate(2 * MiB, stream=stream) for stream in range(1, 200)]
    assert psutil.Process().memory_info().vms - before < 64 << 40
    for block in blocks:
        core.free(block)
    core.close()


class Blocks(RuleBasedStateMachine):
    """Any order of requests, frees, moves, trims and layouts: no overlap, no lost byte, no cap exceeded."""

    addresses = Bundle("addresses")

    def __init__(self) -> None:
        super().__init__()
        self.core = Core("memfd", hbm=32 * PAGE, dram=32 * PAGE)
        self.live: dict[int, tuple[int, int]] = {}
        self.made = 0

    @rule(
        target=addresses,
        nbytes=st.one_of(st.integers(1, 4096), st.integers(1, 6 * PAGE)),
        stream=st.integers(0, 2),
        pool=st.sampled_from([0, 0, 0, 1]),
        apart=st.sampled_from([False, False, True]),
    )
    def allocate(self, nbytes: int, stream: int, pool: int, apart: bool) -> int:
        try:
            with off_sequence() if apart else contextlib.nullcontext():
                address = self.core.allocate(nbytes, stream, pool)
        except CoreFull:
            return 0
        self.made += 1
        value = self.made % 251 + 1
        for begin, (size, _) in self.live.items():
            assert address + nbytes <= begin or begin + size <= address
        self.live[address] = (nbytes, value)
        for at in {address, address + nbytes - 1}:
            fill(at, 1, value)
        return address

    @rule(address=consumes(addresses))
    def free(self, address: int) -> None:
        if address in self.live:
            self.check(address)
            self.core.free(address)
            del self.live[address]

    @rule(address=addresses, stream=st.integers(0, 2))
    def use(self, address: int, stream: int) -> None:
        if address in self.live:
            self.core.used_on(address, stream)

    @rule(address=addresses, tier=st.sampled_from([HBM, DRAM]))
    def move(self, address: int, tier: int) -> None:
        if address in self.live:
            with contextlib.suppress(CoreFull):
                self.core.move(address, tier)
            self.check(address)

    @rule(outside=st.booleans())
    def trim(self, outside: bool) -> None:
        if outside:
            self.core.trim_outside()
        else:
            self.core.trim()

    @rule()
    def period(self) -> None:
        self.core.mark()

    @rule(
        sizes=st.lists(st.integers(1, 64).map(lambda n: 512 * n * 64), min_size=1, max_size=8), seed=st.integers(0, 9)
    )
    def set_layout(self, sizes: list[int], seed: int) -> None:
        offsets = (np.random.default_rng(seed).integers(0, 64, len(sizes)) * 512 * 16).tolist()
        with contextlib.suppress(CoreFull):
            self.core.set_layout(sequence_layout(sizes, offsets), sequence_layout(sizes[::-1], offsets))

    @rule()
    def forget_layout(self) -> None:
        self.core.forget_layout()

    def check(self, address: int) -> None:
        nbytes, value = self.live[address]
        assert ctypes.string_at(address, 1)[0] == value
        assert ctypes.string_at(address + nbytes - 1, 1)[0] == value

    @invariant()
    @precondition(lambda self: hasattr(self, "core"))
    def caps_hold_and_nothing_overlaps(self) -> None:
        counts = self.core.counts()
        assert counts.hbm <= 32 * PAGE
        assert counts.dram <= 32 * PAGE
        assert counts.allocated == sum(-(-size // 512) * 512 for size, _ in self.live.values())
        blocks = np.sort(self.core.blocks(), order="address")
        assert counts.idle == int(blocks["bytes"][blocks["kind"] == FREE].sum())
        assert np.all(blocks["address"][1:] >= (blocks["address"] + blocks["bytes"])[:-1])
        used = {int(block["address"]) for block in blocks if block["kind"] == USED}
        assert used == set(self.live)

    def teardown(self) -> None:
        for address in list(self.live):
            self.check(address)
            self.core.free(address)
        self.core.close()


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_private_pool_has_addresses_for_more_than_any_gpu_has() -> None:
    """After eight heaps pools had 64 GiB of them: the rest lay in DRAM, with HBM free."""
    made = Core("memfd", 139 * GiB, GiB)
    for stream in range(8):
        made.free(made.allocate(4 * MiB, stream))
    blocks = [made.allocate(4 * GiB, 0, pool=1) for _ in range(17)]
    assert all(made.on(block, HBM) == 4 * GiB for block in blocks)
    for block in blocks:
        made.free(block)
    made.close()


def test_what_was_demoted_is_not_needed_in_hbm() -> None:
    """Plans are made for what else lies there: state that was demoted would have everything recomputed."""
    core = Core("memfd", hbm=64 * MiB, dram=64 * MiB)
    core.state(True, most_hbm=0)
    state = core.allocate(16 * MiB)
    core.state(False)
    weight, other = core.allocate(8 * MiB), core.allocate(4 * MiB)
    core.take_peak()
    assert core.take_peak() == 12 * MiB
    core.move(weight, DRAM)
    core.take_peak()
    assert (core.take_peak(), core.counts().demoted) == (4 * MiB, 24 * MiB)
    core.move(weight, HBM)
    assert (core.take_peak(), core.counts().demoted) == (12 * MiB, 16 * MiB)
    for block in (state, weight, other):
        core.free(block)
    core.take_peak()
    assert (core.take_peak(), core.counts().demoted) == (0, 0)
