"""What a run corrected of the links is what its last plan, and others, are predicted with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from torch_tiers.cli.main import main
from torch_tiers.migrator.controller.corrections import Corrections
from torch_tiers.migrator.model.fields import BadField
from torch_tiers.migrator.model.links import PCIE_GEN5, Calls
from torch_tiers.planning import corrections

RUN = Path("tests/data/runs/mlp")
FOUND = Corrections(parts={"h2d": 0.5}, calls=Calls(group=1e-3, moved=2e-3, remade=3e-3))


def as_read(found: Corrections) -> Any:
    return json.loads(json.dumps(corrections.to_json(found)))


def test_links_are_as_the_run_knows_them() -> None:
    links = corrections.corrected(PCIE_GEN5, {"corrections": as_read(FOUND)})
    assert (links.d2h, links.h2d) == (PCIE_GEN5.d2h, PCIE_GEN5.h2d / 2)
    assert links.calls == FOUND.calls


@pytest.mark.parametrize("stats", [{}, {"corrections": None}])
def test_a_run_that_does_not_tell_corrects_nothing(stats: dict[str, Any]) -> None:
    assert corrections.corrected(PCIE_GEN5, stats) == PCIE_GEN5


@pytest.mark.parametrize(
    "value",
    [
        1,
        {},
        {"links": {}, "calls": {}},
        {"links": {"x2y": 1.0}, "calls": as_read(FOUND)["calls"]},
        {"links": {"h2d": 0.0}, "calls": as_read(FOUND)["calls"]},
        {"links": {"h2d": 1.5}, "calls": as_read(FOUND)["calls"]},
        {"links": {}, "calls": {"group": 1.0, "moved": 1.0, "remade": "much"}},
    ],
)
def test_what_no_run_writes_is_refused(value: object) -> None:
    corrections.check(as_read(FOUND))
    with pytest.raises(BadField):
        corrections.check(value)


@pytest.mark.parametrize("verb", ["report", "plan"])
def test_reports_and_plans_of_a_run_predict_with_what_it_corrected(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def predicted(parts: dict[str, float]) -> float:
        run = tmp_path / str(len(parts))
        shutil.copytree(RUN, run)
        stats = json.loads((run / "stats.json").read_text())
        told = corrections.to_json(Corrections(parts=parts))
        (run / "stats.json").write_text(json.dumps(stats | {"corrections": told}))
        words = ["--budget", "48MiB", "--policy", "flashneuron"] if verb == "plan" else []
        assert main([verb, "--json", str(run), *words]) == 0
        answer = json.loads(capsys.readouterr().out)
        return float(answer["policies"]["flashneuron"]["step_s"] if verb == "plan" else answer["answer"]["predicted_s"])

    assert predicted({"d2h": 1e-4, "h2d": 1e-4}) > 1.1 * predicted({})
