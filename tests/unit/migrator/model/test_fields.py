"""What is read of a run's files is checked at the door: nothing behind it has to expect anything else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.modelled import gpt
from torch_tiers.allocator.sizes import GiB
from torch_tiers.migrator.model import trace_json
from torch_tiers.migrator.model.fields import BadField, parse
from torch_tiers.migrator.model.links import PCIE_GEN5
from torch_tiers.migrator.model.plan import Plan
from torch_tiers.migrator.planner.match import check_match
from torch_tiers.migrator.policies import POLICIES

TRACE = gpt(blocks=2)
PLAN = POLICIES["move"](TRACE, 8 * GiB, PCIE_GEN5)

Change = Callable[[Any], object]


def changed(text: str, change: Change) -> str:
    data = json.loads(text)
    change(data)
    return json.dumps(data)


def put(*path: str | int, value: object) -> Change:
    def change(data: Any) -> None:
        for step in path[:-1]:
            data = data[step]
        data[path[-1]] = value

    return change


def first_recipe(name: str, value: object) -> Change:
    return lambda data: next(iter(data["recipes"].values())).update({name: value})


def recipe_of_itself(data: Any) -> None:
    ident, recipe = next(iter(data["recipes"].items()))
    recipe["inputs"] = [int(ident)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("positions", value=True), "positions is True and not a whole number"),
        (put("positions", value=10**9), "positions is 1000000000 and not a whole number"),
        (put("positions", value=2_000_000), "positions is 2000000, where no more than"),
        (put("positions", value=10**400), "positions is a number of many digits and not"),
        (put("sites", value={}), "sites is an object and not a list"),
        (put("sites", 3, "nbytes", value=-5), r"sites\[3\].nbytes is -5 and not a whole number"),
        (put("sites", 3, "nbytes", value=1e3), r"sites\[3\].nbytes is 1000.0 and not a whole number"),
        (put("sites", 3, "uses", value=[10**6]), r"sites\[3\].uses\[0\] is 1000000 and not"),
        (put("sites", 3, "uses", value=[0]), r"sites\[3\].uses are not one after the other"),
        (put("sites", 3, "birth", value=1), r"sites\[3\].birth is not after"),
        (put("sites", 3, "key", value=7), r"sites\[3\].key is 7 and not a string"),
        (put("sites", 3, "more", value=7), r"sites\[3\] has an unknown field 'more'"),
        (lambda data: data["sites"][3].pop("key"), r"sites\[3\].key is missing"),
        (lambda data: data["sites"][3].update(key=data["sites"][2]["key"]), r"sites\[3\].key is that of a site before"),
        (put("times", value=[0.0]), "times has 1 items, and not one for each of"),
        (put("times", 0, value=None), r"times\[0\] is None and not a number"),
        (put("others", value=[0]), "others has 1 items"),
        (put("others", 0, value=-1), r"others\[0\] is -1 and not"),
        (put("seconds", value=-1.0), "seconds is -1.0 and not a number"),
        (put("recipes", value={"x": {}}), r"recipes\['x'\].op is missing"),
        (put("recipes", "99999", value={"op": "", "inputs": [], "seconds": 0}), "of a storage that no site has"),
        (first_recipe("inputs", [99999]), "inputs names a storage that no site has"),
        (first_recipe("scratch", 1 << 70), "scratch is 1180591620717411303424 and not"),
        (recipe_of_itself, "inputs make it from itself"),
        (put("held", value={"99999": 1}), "held.'99999'. is of a storage that no site has"),
    ],
)
def test_a_trace_that_no_run_writes_is_refused_by_its_field(change: Change, message: str) -> None:
    with pytest.raises(BadField, match=message):
        trace_json.read(changed(trace_json.write(TRACE), change))


def test_a_trace_of_recipes_in_a_circle_is_refused() -> None:
    def change(data: Any) -> None:
        (one, first), (other, second) = list(data["recipes"].items())[:2]
        first["inputs"], second["inputs"] = [int(other)], [int(one)]

    with pytest.raises(BadField, match="make it from itself"):
        trace_json.read(changed(trace_json.write(TRACE), change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("room", value=-1), "room is -1 and not a whole number"),
        (put("room", value=1.5), "room is 1.5 and not a whole number"),
        (put("groups", 0, "tier", value="tape"), r"groups\[0\].tier is neither dram, nor nvme"),
        (put("groups", 0, "sites", value=[]), r"groups\[0\].sites is empty"),
        (lambda data: data["groups"].append(data["groups"][0]), "plan has two places for"),
        (put("limits", "a:0", value=[1]), r"limits\['a:0'\] is not two numbers"),
        (put("keep", "a:0", value={"enter": 1}), r"keep\['a:0'\].leave is missing"),
        (lambda data: data.pop("policy"), "policy is missing"),
    ],
)
def test_a_plan_that_no_run_writes_is_refused_by_its_field(change: Change, message: str) -> None:
    with pytest.raises(BadField, match=message):
        Plan.from_json(changed(PLAN.to_json(), change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("recompute", value=["nobody:0"]), "plan recomputes 'nobody:0'"),
        (put("groups", 0, "sites", value=["nobody:0"]), r"groups\[0\].sites are not of the trace"),
    ],
)
def test_a_plan_of_another_trace_is_refused(change: Change, message: str) -> None:
    check_match(Plan.from_json(PLAN.to_json()), TRACE)
    with pytest.raises(BadField, match=message):
        check_match(Plan.from_json(changed(PLAN.to_json(), change)), TRACE)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_what_is_no_number_is_refused_wherever_it_is(number: str) -> None:
    with pytest.raises(ValueError, match="is no number that can be reckoned with"):
        parse(f'{{"anything": [{number}]}}')


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_what_is_nested_too_deeply_is_refused(opening: str) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse(opening * 1_000_000)


@pytest.mark.parametrize("name", ["1.5", "", "x", "9" * 30, "--1"])
def test_a_storage_has_a_number(name: str) -> None:
    with pytest.raises(BadField, match="no number of a storage"):
        trace_json.read(changed(trace_json.write(TRACE), lambda data: data["held"].update({name: 1})))


def test_every_plan_of_ours_passes() -> None:
    for name in ("auto", "keep", "move", "flashneuron", "checkpoint"):
        plan = POLICIES[name](TRACE, 40 * GiB, PCIE_GEN5)
        again = Plan.from_json(plan.to_json())
        assert again.is_the_same_as(plan)
        check_match(again, TRACE)
