"""Several recordings of one iteration: the shortest time of each stretch, and of what is alike."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import pytest

from torch_tiers.migrator.model.timing import CALL, LARGE, alike, at_pace, product_in, together
from torch_tiers.migrator.model.trace import Recipe, Site, Trace

SITES = (Site("a:0", 0, 100, 0, (3,)), Site("b:0", 1, 100, 1, (2,)))
TRACE = Trace(SITES, 4, times=(1.0, 2.0, 3.0, 4.0), seconds=5.0, others=(9, 9, 9, 9, 9))


def test_each_stretch_takes_what_it_took_when_nothing_disturbed_it() -> None:
    late = replace(TRACE, times=(1.0, 2.0, 8.0, 9.0), seconds=9.5)
    seen = together(late, TRACE)
    assert seen.times == (1.0, 2.0, 3.0, 4.0)
    assert seen.seconds == 4.5
    assert together(TRACE, late) == seen


def test_other_sites_are_another_iteration() -> None:
    other = replace(TRACE, sites=SITES[:1])
    assert together(TRACE, other) == other


def test_what_was_in_hbm_by_accident_is_not_counted() -> None:
    assert together(TRACE, replace(TRACE, others=(9, 11, 9, 7, 9))).others == (9, 9, 9, 7, 9)


def test_what_an_iteration_began_with_is_counted_in_whatever_order_they_were_recorded() -> None:
    """Gradients that accumulate: the first iteration of a step begins without them, the others with them."""
    without, having = replace(TRACE, others=(7, 9, 9, 11, 12)), replace(TRACE, others=(11, 13, 13, 13, 12))
    for order in ((without, having), (having, without), (without, having, without), (having, without, having)):
        assert reduce(together, order).others == (11, 13, 13, 13, 12)


def test_what_the_program_holds_it_holds_as_long_as_any_recording_says() -> None:
    assert together(replace(TRACE, held={0: 3}), replace(TRACE, held={0: 2, 1: 4})).held == {0: 3, 1: 4}


def test_recipes_are_known_from_any_recording() -> None:
    first = replace(TRACE, recipes={0: Recipe("Gelu", (1,), 0.5)})
    second = replace(TRACE, recipes={0: Recipe("Gelu", (1,), 0.2)})
    assert together(first, second).recipes[0].seconds == 0.2
    assert together(first, TRACE).recipes[0].seconds == 0.5


@pytest.mark.parametrize(("other", "seconds"), [("Gelu", [0.2, 0.2]), ("LayerNorm", [0.5, 0.2])])
def test_only_what_does_the_same_to_as_many_bytes_takes_the_same_time(other: str, seconds: list[float]) -> None:
    recipes = {0: Recipe("Gelu", (9,), 0.5), 1: Recipe(other, (8,), 0.2)}
    seen = alike(replace(TRACE, recipes=recipes))
    assert [recipe.seconds for recipe in seen.recipes.values()] == seconds


def test_a_short_recipe_takes_no_longer_a_byte_than_a_large_one() -> None:
    sites = (Site("a:0", 0, 4 * LARGE, 0, (3,)), Site("b:0", 1, LARGE // 64, 1, (2,)))
    late = {0: Recipe("Relu", (9,), 400e-6), 1: Recipe("Relu", (8,), 90e-6)}
    seen = alike(replace(TRACE, sites=sites, recipes=late))
    assert seen.recipes[0].seconds == 400e-6
    assert seen.recipes[1].seconds == pytest.approx(CALL + 400e-6 / 256)


def test_another_pace_is_that_of_everything_the_device_computes() -> None:
    trace = replace(TRACE, recipes={0: Recipe("Gelu", (9,), 0.5)})
    half = at_pace(trace, 0.5)
    assert (half.times, half.seconds) == ((0.5, 1.0, 1.5, 2.0), 2.5)
    assert half.recipes[0].seconds == 0.25
    assert at_pace(trace, 1.0) == trace


def test_a_product_is_found_among_the_operators_of_a_name() -> None:
    assert product_in("relu(3 more, convolution, add)") == "convolution"
    assert product_in("add(t, addmm)") == "addmm"
    assert product_in("gelu(native_layer_norm, comment)") is None


def test_a_matrix_product_takes_the_time_that_its_own_inputs_cost() -> None:
    sites = (Site("a:0", 0, LARGE, 0, (3,)), Site("b:0", 1, LARGE, 1, (2,)), Site("c:0", 2, 4 * LARGE, 1, (2,)))
    products = {0: Recipe("addmm", (2,), 900e-6), 1: Recipe("addmm", (9,), 300e-6)}
    seen = alike(replace(TRACE, sites=sites, recipes=products))
    assert [recipe.seconds for recipe in seen.recipes.values()] == [900e-6, 300e-6]


def test_kernels_of_other_sizes_take_other_times_though_they_make_as_much() -> None:
    """A ResNet's 3 x 3 convolution had the time of its 1 x 1."""
    sites = tuple(Site(f"{name}:0", k, LARGE, k, (5 - k,)) for k, name in enumerate("abc"))
    recipes = {
        0: Recipe("convolution", (7,), 300e-6, kind="1x1"),
        1: Recipe("convolution", (7,), 900e-6, kind="3x3"),
        2: Recipe("convolution", (8,), 800e-6, kind="3x3"),
    }
    seen = alike(replace(TRACE, sites=sites, recipes=recipes))
    assert [recipe.seconds for recipe in seen.recipes.values()] == [300e-6, 800e-6, 800e-6]
