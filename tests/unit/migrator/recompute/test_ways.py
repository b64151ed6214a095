"""A site's formula is searched for once, and found again by the way to it; whatever is different is seen.

Each test holds what follows the way in Python and its native twin to the same.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.unit.migrator.recompute.test_formulas import (
    BIAS,
    MATRIX,
    OPERATIONS,
    WEIGHT,
    Packer,
    X,
    assert_bitwise,
    saved,
)
from tests.unit.natively import built, needs_compiler
from torch_tiers.migrator.recompute import finder, ways
from torch_tiers.migrator.recompute.dropped import run
from torch_tiers.migrator.recompute.finder import Finder, Follow, Took, Verified, base_of, find, layout
from torch_tiers.migrator.recompute.origins import Origins, note, note_epsilon

Forward = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True, params=["python", pytest.param("native", marks=needs_compiler)])
def follow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Follow:
    found: Follow = ways.follow if request.param == "python" else built().follow
    monkeypatch.setattr(Site, "follow", staticmethod(found))
    return found


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The nodes from which formulas were searched for."""
    nodes: list[Any] = []
    search = finder.search

    def watched(node: Any, source: Origins, table: Any) -> Any:
        nodes.append(node)
        return search(node, source, table)

    monkeypatch.setattr(finder, "search", watched)
    return nodes


class Site:
    """One site of a program, verified with its first forward."""

    follow: Follow = staticmethod(ways.follow)

    def __init__(self, searches: list[Any], forward: Forward, x: Tensor = X) -> None:
        self.searches = searches
        made, source = self._forward(Packer(), forward, x)
        formula = find(base_of(made), source)
        assert formula is not None
        self.name = formula.name
        self.finder = Finder(
            Verified(
                {formula.name: Took(0.0, 0)},
                None,
                layout(base_of(made)),
                base_of(made)._version,
                source.searched,
                frozenset(source.found),
            ),
            self.follow,
        )
        assert self.again(forward, x)[0] == "searched"

    def _forward(self, packer: Packer, forward: Forward, x: Tensor) -> tuple[Tensor, Origins]:
        with packer.on():
            return forward(x.clone().requires_grad_() * 1), packer.source()

    def again(self, forward: Forward, x: Tensor = X) -> tuple[str, Any]:
        """How a further forward's formula was found; and the formula, which has been seen to give the same bits."""
        packer = Packer()
        made, source = self._forward(packer, forward, x)
        before = len(self.searches)
        formula = self.finder.find(base_of(made), source)
        if formula is not None:
            assert_bitwise(run(formula, packer.unpack), made)
        how = "followed" if len(self.searches) == before else "searched"
        return ("refused" if formula is None else how), formula


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_found_again_without_a_search(name: str, searches: list[Any]) -> None:
    site = Site(searches, OPERATIONS[name])
    for seed in range(2):
        how, formula = site.again(OPERATIONS[name], torch.randn(X.shape, generator=torch.Generator().manual_seed(seed)))
        assert how == "followed"
        assert formula.name == site.name


SETTINGS: dict[str, tuple[Forward, Forward]] = {
    "alpha": (
        lambda x: torch.add(saved(x), saved(x * 2), alpha=2),
        lambda x: torch.add(saved(x), saved(x * 2), alpha=3),
    ),
    "epsilon": (
        lambda x: F.group_norm(x, 2, WEIGHT, BIAS, 1e-5),
        lambda x: F.group_norm(x, 2, WEIGHT, BIAS, 1e-3),
    ),
    "slope": (lambda x: F.leaky_relu(x, 0.2), lambda x: F.leaky_relu(x, 0.3)),
    "sign of a zero": (lambda x: F.hardtanh(x, -1.0, 0.0), lambda x: F.hardtanh(x, -1.0, -0.0)),
    "dimensions": (
        lambda x: saved(x).transpose(2, 3).contiguous(),
        lambda x: saved(x).transpose(1, 3).contiguous(),
    ),
    "shape of a view": (lambda x: F.relu(saved(x).view(4, 8, 36)), lambda x: F.relu(saved(x).view(8, 4, 36))),
    "mode": (lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="tanh")),
    "scale": (
        lambda x: torch.native_dropout(saved(x), 0.5, True)[0],
        lambda x: torch.native_dropout(saved(x), 0.25, True)[0],
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_has_changed_is_heeded(name: str, searches: list[Any]) -> None:
    before, after = SETTINGS[name]
    site = Site(searches, before)
    assert site.again(after)[0] == "searched"
    assert site.again(after)[0] == "followed"
    assert site.again(before)[0] == "searched"


OTHER_GRAPHS: dict[str, tuple[Forward, Forward]] = {
    "another operation": (lambda x: F.silu(x), lambda x: F.gelu(x)),
    "another operation before": (lambda x: F.relu(saved(x) + saved(x * 2)), lambda x: F.relu(saved(x) - saved(x * 2))),
    "an input that was saved": (
        lambda x: F.relu(saved(x).view(4, -1)),
        lambda x: F.relu(saved(saved(x).view(4, -1))),
    ),
    "no bias": (
        lambda x: F.group_norm(x, 2, WEIGHT, BIAS),
        lambda x: F.group_norm(x, 2, WEIGHT, None),
    ),
    "a bias": (
        lambda x: F.batch_norm(x, None, None, WEIGHT, BIAS, True),
        lambda x: F.batch_norm(x, None, None, WEIGHT, None, True),
    ),
    "a leaf": (
        lambda x: saved(x) + saved(x * 2),
        lambda x: saved(x) + WEIGHT[0].detach().requires_grad_(),
    ),
    "statistics that are not the batch's": (
        lambda x: F.batch_norm(x, torch.zeros(8), torch.ones(8), WEIGHT, BIAS, True),
        lambda x: F.batch_norm(x, torch.zeros(8), torch.ones(8), WEIGHT, BIAS, False),
    ),
    "nothing that was saved": (lambda x: F.relu(saved(x)), lambda x: F.relu(x)),
}


@pytest.mark.parametrize("name", OTHER_GRAPHS)
def test_another_graph_at_the_same_site_is_refused(name: str, searches: list[Any]) -> None:
    before, after = OTHER_GRAPHS[name]
    site = Site(searches, before)
    assert site.again(after)[0] == "refused"
    assert site.again(before)[0] == "followed"


def test_one_tensor_twice_is_not_two(searches: list[Any]) -> None:
    """The numbers of a pattern are those of the places at which inputs were found, not those of the inputs."""
    site = Site(searches, lambda x: saved(x) * saved(x))
    how, _ = site.again(lambda x: saved(x) * saved(x + 1))
    assert how == "followed"


def test_inputs_come_in_the_order_of_the_formula(searches: list[Any]) -> None:
    """RMS norm asks for its weight before it asks for its input."""
    weight = torch.rand(6, requires_grad=True)
    site = Site(searches, lambda x: F.rms_norm(x, (6,), weight))
    assert site.again(lambda x: F.rms_norm(x, (6,), weight))[0] == "followed"


def test_a_smaller_batch_is_found_and_another_layout_refused(searches: list[Any]) -> None:
    site = Site(searches, F.silu)
    assert site.again(F.silu, X[:2])[0] == "followed"
    assert site.again(F.silu, X.to(memory_format=torch.channels_last))[0] == "refused"


@pytest.mark.parametrize("name", ["cast of a parameter", "linear layer"])
def test_a_parameter_that_has_changed_is_refused(name: str, searches: list[Any]) -> None:
    forward = {"cast of a parameter": lambda x: BIAS.to(torch.bfloat16), "linear layer": OPERATIONS["linear layer"]}[
        name
    ]
    site, packer = Site(searches, forward), Packer()
    with packer.on():
        made = forward(X.clone().requires_grad_() * 1)
        source = packer.source()
    assert site.finder.find(made, source) is not None
    with torch.no_grad():
        BIAS.add_(0)
    assert site.finder.find(made, source) is None


def test_what_an_earlier_forward_made_is_refused(searches: list[Any]) -> None:
    def forward(x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x[0], MATRIX, BIAS))

    site, packer = Site(searches, forward), Packer()
    with packer.on():
        made = forward(X.clone().requires_grad_() * 1)
    for began, held in ((0, True), (1 << 63, False)):
        versions = {id(BIAS): (weakref.ref(BIAS), BIAS._version)}
        source = Origins(packer.unpack, packer.pack, versions, set(), set(), began)
        assert (site.finder.find(made, source) is not None) is held


def test_what_another_thread_s_hooks_have_packed_is_refused(searches: list[Any]) -> None:
    site, others = Site(searches, F.silu), Packer()
    with others.on():
        made = F.silu(X.clone().requires_grad_() * 1)
    assert site.finder.find(made, others.source()) is not None
    assert site.finder.find(made, Packer().source()) is None


def test_an_input_that_is_gone_is_refused(searches: list[Any]) -> None:
    site, packer = Site(searches, lambda x: F.relu(saved(x))), Packer()
    with packer.on():
        x = X.clone().requires_grad_() * 1
        made = F.relu(saved(x))
        source = packer.source()
    assert site.finder.find(made, source) is not None
    note(x, (torch.zeros(1), 0), "")  # dead at once
    assert site.finder.find(made, source) is None


def test_an_epsilon_that_the_module_has_changed_is_heeded(searches: list[Any]) -> None:
    norm = torch.nn.LayerNorm(6)

    def forward(x: Tensor) -> Tensor:
        made = norm(x)
        note_epsilon(norm, made)
        return made

    site = Site(searches, forward)
    assert site.again(forward)[0] == "followed"
    norm.eps = 1e-2
    assert site.again(forward)[0] == "searched"
    assert site.again(forward)[0] == "followed"


def test_sites_that_are_alike_have_one_way(searches: list[Any]) -> None:
    """A model of many equal layers reads a handful of them in every step, not hundreds."""
    gelu, other = (Site(searches, lambda x: F.gelu(x)) for _ in range(2))
    tanh = Site(searches, lambda x: F.gelu(x, approximate="tanh"))
    found = [site.finder._pattern.way for site in (gelu, other, tanh) if site.finder._pattern is not None]
    assert found[0] is found[1]
    assert found[0] != found[2]


def test_a_program_of_ever_new_shapes_does_not_fill_memory_with_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "_known", known := {})
    for k in range(ways.MOST + 100):
        ways.one_of(ways.Way("ConvolutionBackward0", (ways.Absent(k),)))
    assert len(known) <= ways.MOST


def test_a_pattern_holds_no_tensor(searches: list[Any]) -> None:
    """Nothing that a step has made lives on in what is kept of the way."""
    packer = Packer()
    with packer.on():
        x = saved(X.clone().requires_grad_() * 1)
        made = F.relu(F.group_norm(x, 2, WEIGHT, BIAS) + x)
        source = packer.source()
        formula = find(made, source)
        assert formula is not None
        finder = Finder(
            Verified({formula.name: Took(0.0, 0)}, None, layout(made), made._version, True, frozenset()), Site.follow
        )
        assert finder.find(made, source) is not None
    assert not [thing for thing in _reachable(finder) if isinstance(thing, Tensor)]


def _reachable(thing: object) -> list[object]:
    seen: dict[int, object] = {}
    todo = [thing]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, (type, ModuleType)):
            continue
        seen[id(one)] = one
        # A function's globals are the module's, not its own.
        held = one.__closure__ or () if hasattr(one, "__closure__") else gc.get_referents(one)
        todo += held
    return list(seen.values())
