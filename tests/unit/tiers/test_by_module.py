"""Which module moves most? What a plan does, summed up the tree of modules."""

from __future__ import annotations

from rich.table import Table

from torch_tiers.migrator.model.plan import Keep, PageGroup, Plan
from torch_tiers.migrator.model.trace import Site, Trace
from torch_tiers.planning.by_module import ROWS, Sum, by_module, folded, render

SITES = (
    Site("Net.layers.0.up:0", 0, 100, 0, (9,)),
    Site("Net.layers.0.down:0", 1, 30, 1, (8,)),
    Site("Net.layers.1.up:0", 2, 50, 2, (7,)),
    Site("Net.layers.1.up:1", 2, 50, 3, (6,)),  # on the same storage
    Site(":0", 3, 7, 4, (5,)),
)
PLAN = Plan(
    "auto",
    1000,
    {":0": Keep(7, 7)},
    (PageGroup(("Net.layers.0.up:0",), 100, 0, 9), PageGroup(("Net.layers.1.up:0", "Net.layers.1.up:1"), 50, 3, 6)),
    ("Net.layers.0.down:0",),
)


def test_each_storage_counts_once_by_what_the_plan_does_with_it() -> None:
    sums = by_module(Trace(SITES, 10), PLAN)
    assert sums == {
        "Net.layers.0.up": Sum(moved=100),
        "Net.layers.0.down": Sum(recomputed=30),
        "Net.layers.1.up": Sum(moved=50),
        "": Sum(kept=7),
    }
    assert sum(each.moved for each in sums.values()) == PLAN.moved_bytes


def test_a_module_has_what_all_within_it_have_at_the_depth_that_fits() -> None:
    sums = by_module(Trace(SITES, 10), PLAN)
    assert [*folded(sums, 4)] == ["Net.layers.0.up", "Net.layers.1.up", "Net.layers.0.down", ""]
    assert folded(sums, 3)["Net.layers.0"] == Sum(moved=100, recomputed=30)
    assert folded(sums, 2) == {"Net.layers": Sum(moved=150, recomputed=30), "": Sum(kept=7)}


def test_the_table_fits_a_screen_and_has_all_of_it() -> None:
    sums = {f"Net{number}": Sum(moved=number) for number in range(1, 51)}
    sentence, table = render(sums)
    assert isinstance(table, Table) and table.row_count == ROWS + 2
    assert str(sentence).startswith("Net50 moves most 50 B: 4% of the 1.2 KiB")


def test_that_several_move_as_much_is_told() -> None:
    sentence, _ = render({"A": Sum(moved=10), "B": Sum(moved=10), "C": Sum(moved=5)})
    assert str(sentence).startswith("A and 1 more move most, each 10 B")


def test_a_plan_that_moves_nothing_says_so() -> None:
    assert next(iter(render({"A": Sum(kept=5)}))) == "nothing moves under this plan"
    assert [*render({"A": Sum()})] == ["no module saves anything that could move"]
