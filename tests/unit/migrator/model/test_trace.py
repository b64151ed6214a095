from __future__ import annotations

from hypothesis import given

from tests.unit.traces import chain, traces
from torch_tiers.allocator.layout.lifetimes import Lifetime
from torch_tiers.migrator.model.trace import KEPT, Site, Trace


def test_sites_on_one_storage_are_one_lifetime() -> None:
    trace = Trace((Site("a:0", 7, 64, 0, (4,)), Site("b:0", 7, 64, 1, (3, 5))), positions=6)
    assert trace.lifetimes == (Lifetime(7, 64, birth=0, uses=(3, 4, 5)),)


def test_a_storage_is_as_large_as_its_largest_site() -> None:
    trace = Trace((Site("a:0", 7, 0, 0, ()), Site("b:0", 7, 64, 1, ())), positions=2)
    assert trace.saved_bytes == 64


def test_a_storage_without_bytes_to_move_has_no_lifetime() -> None:
    assert Trace((Site("a:0", 7, 0, 0, (1,)),), positions=2).lifetimes == ()


def test_lifetimes_are_in_the_order_of_births() -> None:
    assert [life.ident for life in chain([1, 2, 3]).lifetimes] == [0, 1, 2]


@given(traces())
def test_shared_storages_count_once(trace: Trace) -> None:
    assert trace.saved_bytes == sum({site.storage: site.nbytes for site in trace.sites}.values())


def test_a_kind_that_was_not_recorded_is_empty() -> None:
    assert Site("a:0", 0, 64, 0, ()).kind == ""


def test_an_operation_holds_what_it_saves_until_it_has_computed() -> None:
    """A batch normalisation saves its input, its weight and its statistics, and makes its output last."""
    sites = [Site("conv:0", 0, 8, 0, (6,)), *(Site(f"norm:{k}", 1 + k, 8, 1 + k, ()) for k in range(3))]
    trace = Trace((*sites, Site("relu:0", 4, 8, 4, (5,))), 7, held={0: 4})
    assert trace.released_at == {0: 4, 1: 5, 2: 5, 3: 5, 4: 6}


def test_what_follows_in_one_module_is_not_all_of_one_operation() -> None:
    """In a forward that calls functions alone nothing was ever let go of, so that recomputing freed nothing."""
    trace = Trace(tuple(Site(f"net:{k}", k, 8, k, (47 - k,)) for k in range(24)), 48)
    assert [trace.released_at[k] for k in range(24)] == [min(k + KEPT - 1, 23) + 2 for k in range(24)]
