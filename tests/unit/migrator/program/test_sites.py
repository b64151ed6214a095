from __future__ import annotations

import gc

from torch import nn

from torch_tiers.migrator.program.sites import Modules, Node


def visit(modules: Modules[str], *path: nn.Module) -> Node[str]:
    for module in path:
        modules.enter(module)
    node = modules.place.here
    for _ in path:
        modules.leave()
    return node


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))


def test_a_path_names_the_root_and_the_way_to_the_module() -> None:
    modules, model = Modules[str](), block()
    assert visit(modules, model).path == "Sequential"
    assert visit(modules, model, model[1], model[1][0]).path == "Sequential.1.0"  # type: ignore[index]


def test_leaving_leads_back() -> None:
    modules, model = Modules[str](), block()
    modules.enter(model)
    modules.enter(model[0])  # type: ignore[index]
    modules.leave()
    assert modules.place.here.path == "Sequential"
    modules.leave()
    assert modules.outside


def test_a_second_root_of_one_class_has_a_name_of_its_own() -> None:
    modules, one, other = Modules[str](), nn.Linear(2, 2), nn.Linear(2, 2)
    assert [visit(modules, root).path for root in (one, other, one)] == ["Linear", "Linear#2", "Linear"]


def test_a_module_keeps_its_node_between_forwards() -> None:
    modules, model = Modules[str](), block()
    assert visit(modules, model, model[0]) is visit(modules, model, model[0])  # type: ignore[index]


def test_a_module_made_within_a_forward_is_named_by_class_and_place() -> None:
    modules, model = Modules[str](), block()
    nodes = [visit(modules, model, nn.ReLU()) for _ in range(3)]
    assert {node.path for node in nodes} == {"Sequential.<ReLU>"}
    assert nodes[0] is nodes[2]


def test_a_root_that_is_made_anew_in_every_step_keeps_its_name() -> None:
    modules = Modules[str]()
    assert [visit(modules, nn.MSELoss()).path for _ in range(3)] == ["MSELoss"] * 3


def test_a_root_that_is_gone_is_forgotten() -> None:
    modules, model = Modules[str](), block()
    visit(modules, model)
    del model
    gc.collect()
    assert not modules.nodes and not modules._roots


def test_a_wrapper_that_comes_and_goes_renames_no_model() -> None:
    """One around the model for each evaluation: after each the model had another name, and no plan."""
    modules, model = Modules[str](), block()
    inner = model[0]  # type: ignore[index]
    before = visit(modules, model), visit(modules, model, inner)
    for _ in range(3):
        wrapper = nn.Sequential(model, nn.Sigmoid())
        assert visit(modules, wrapper).path == "Sequential#2"
        assert visit(modules, wrapper, wrapper[1]).path == "Sequential#2.1"
        assert visit(modules, wrapper, model, inner) is before[1]
        del wrapper
        gc.collect()
        assert (visit(modules, model), visit(modules, model, inner)) == before
    assert len(modules.nodes) == 4


def test_a_module_keeps_no_name_of_one_that_is_gone_and_had_its_id() -> None:
    modules, model = Modules[str](), block()
    visit(modules, model)
    replaced = id(model[0])  # type: ignore[index]
    model[0] = nn.Identity()  # type: ignore[index]
    gc.collect()
    assert replaced not in modules.nodes  # where a root that has its id would be taken for it
    others = [nn.Sequential(nn.Linear(2, 2)) for _ in range(64)]
    for other in others:
        visit(modules, other)
    assert all(visit(modules, other, other[0]).path.endswith(".0") for other in others), replaced
    assert len({visit(modules, other, other[0]).path for other in others}) == 64


def test_outside_of_all_modules_the_path_is_empty_and_a_leave_is_harmless() -> None:
    modules = Modules[str]()
    for _ in range(2):
        assert modules.outside
        assert modules.place.here.path == ""
        modules.leave()
