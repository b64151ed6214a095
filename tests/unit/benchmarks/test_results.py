"""`RESULTS.md` and README's speeds are what data and reports say, and each script says what it is for."""

from __future__ import annotations

import ast
import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks import results, speeds
from benchmarks.contention.report import Cell, of_plain
from benchmarks.zoo.results import OWN, SAVE_ON_CPU
from torch_tiers.allocator.sizes import GiB

ROOT = Path(__file__).parents[3]
SHELF = ROOT / "benchmarks"
SHARED = {
    "alternate",
    "compiled",
    "counts",
    "settling",
    "speeds",
    "turns",
    "unet",
    "workloads",
    "demo_report",
    "kills",
}  # by scripts
FIGURE = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.]|,\d)")
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "docs/guides/*.md",
    "benchmarks/*.md",
    "benchmarks/reports/*.md",
)


def scripts() -> list[str]:
    files = {path.stem for path in SHELF.glob("*.py")} - SHARED - {"__init__"}
    return sorted(files | {path.parent.name for path in SHELF.glob("*/__main__.py")})


def test_the_page_is_what_data_and_reports_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = results.PAGE.read_text()
    monkeypatch.setattr(results, "PAGE", tmp_path / "RESULTS.md")
    monkeypatch.setattr(results, "README", Path(shutil.copy(ROOT / "README.md", tmp_path)))
    monkeypatch.setattr(results, "PICTURE", tmp_path / "speeds.svg")
    results.main([])
    assert (tmp_path / "RESULTS.md").read_text() == written, "run python -m benchmarks.results"
    assert "<!--" not in written


def test_the_table_of_the_readme_is_what_the_command_makes_of_the_zoo() -> None:
    text = (ROOT / "README.md").read_text()
    assert results.readme(text) == text, "run python -m benchmarks.results"
    with pytest.raises(ValueError, match="README has no table"):
        results.readme("no table")


def test_the_picture_of_the_readme_has_all_programs_of_its_table() -> None:
    """Of its lines matplotlib's versions may differ."""
    assert f"({results.PICTURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text()
    shown = set(re.findall(r">([^<>]+)</text>", results.PICTURE.read_text()))
    now = set(re.findall(r">([^<>]+)</text>", speeds.picture(speeds.load())))
    named = {one["program"] for one in speeds.load() if one["budget"] == speeds.CLAIMED}
    assert named <= shown and shown == now, "run python -m benchmarks.results"


def test_what_is_claimed_is_the_median_and_the_worst_of_all_programs() -> None:
    known = {"budget": 60, "settled": True}
    named = [("a", 0.95), ("b", 0.85), ("c", 0.3)]
    beside = {OWN: {"speed": 0.5, "memory": 40}}
    of = [known | {"program": name, "speed": speed, "beside": beside} for name, speed in named]
    table = dict(speeds.claims([*of, known | {"program": "d", "speed": 0.2, "budget": 45, "beside": {}}]))
    assert (table["**median**"], table["**worst**"]) == ("**0.850** of 3 programs", "**0.300** (c)")
    assert table["0.8 to 0.9"] == "b 0.850 (0.500 at 40%)" and table["under 0.7"].startswith("c")
    told = table["own checkpointing"]
    assert told.startswith("slower than torch-tiers for 2 of the 3 programs") and told.endswith(
        "40 to 40% of plain's memory"
    )


def test_what_a_run_of_the_zoo_measured_takes_the_place_of_what_is_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speeds, "FILE", tmp_path / "zoo.json")
    old = {"program": "gpt", "budget": 60, "speed": 0.5, "settled": False, "beside": {}, "card": "H100", "day": "11-01"}
    speeds.FILE.write_text(json.dumps([old, old | {"program": "vit", "speed": 0.4}]))
    plain = {"memory": 20 * GiB, "step": {"median": 0.1}, "fraction": {"median": 1.0}, "settled": True}
    ours = plain | {"fraction": {"median": 0.8}}
    rows = {"plain": plain, "tiers auto at 60%": ours, "tiers auto at 45%": ours | {"fraction": None}}
    rows[OWN] = plain | {"fraction": {"median": 0.7}, "memory": 8 * GiB}
    rows[SAVE_ON_CPU] = plain | {"fraction": {"median": 0.2}, "memory": 6 * GiB}
    told = {"gpt": {"error": "", "rows": rows, "device": "NVIDIA H200", "day": "12-01"}, "dit": {"error": "no"}}
    (tmp_path / "results.json").write_text(json.dumps(told))
    speeds.take_over(tmp_path / "results.json")
    new, kept = speeds.load()
    assert kept["program"] == "vit"
    figures = {"plain_ms": 100.0, "plain_gib": 20.0, "speed": 0.8}
    figures["beside"] = {OWN: {"speed": 0.7, "memory": 40}, SAVE_ON_CPU: {"speed": 0.2, "memory": 30}}
    assert new == old | figures | {"settled": True, "card": "H200", "day": "12-01"}


def test_each_report_is_on_the_page_and_says_what_is_not_shown() -> None:
    assert sorted(results.ORDER.split()) == sorted(path.stem for path in (SHELF / "reports").glob("*.md"))
    for path in (SHELF / "reports").glob("*.md"):
        title, *_ = text = path.read_text().splitlines()
        assert title.startswith("# ") and title.endswith("?"), f"{path.name}: the title is the question"
        assert text[2] == "## Result" and "## What is not shown" in text, path.name
        _, _, result = path.read_text().partition("## Result\n")
        result = result.partition("\n## ")[0]
        assert re.search(r"\b11-\d\d\b|\b\d\d-\d\d\b", result), f"{path.name}: the result has its day"
        assert re.search(r"H[12]00|A CPU", result), f"{path.name}: the result has its card"
        assert re.search(r"python -m |\bpytest\b", result), f"{path.name}: the result has its command"


def test_what_was_measured_in_several_sittings_is_a_table() -> None:
    table = results.render(results.contention())
    assert "nan" not in table and "copies at 120 GB/s" in table


def test_a_load_is_told_as_what_it_keeps_of_what_it_has_beside_plain_training() -> None:
    cells = [Cell(0, "copies", "on", 9.0, 30.0, plain_training=10.0, plain_preprocessing=40.0)]
    assert of_plain(cells, "copies", "on", "preprocessing") == 0.75


def test_a_figure_of_the_readme_is_found_in_the_results() -> None:
    """As it is there, or rounded to fewer digits."""
    readme = (ROOT / "README.md").read_text()
    claims = readme.partition("## How fast is it?")[2].partition("## Further reading")[0]
    assert "## When it is the wrong tool" in claims
    found = FIGURE.findall(results.PAGE.read_text())
    known = {f"{float(figure):.{digits}f}" for figure in found for digits in range(1, 5)} | set(found)
    assert [figure for figure in FIGURE.findall(claims) if figure not in known] == []


@pytest.mark.parametrize("name", scripts())
def test_a_script_begins_with_its_question_and_its_command(name: str) -> None:
    path = SHELF / f"{name}.py"
    path = path if path.exists() else SHELF / name / "__init__.py"
    said = ast.get_docstring(ast.parse(path.read_text()))
    assert said is not None and "?" in said.partition("\n\n")[0], "the first sentence is the question"
    assert f"python -m benchmarks.{name}" in said, "and then comes the command"
    assert f"benchmarks.{name}" in (SHELF / "README.md").read_text(), "the table of benchmarks/README.md has it"


def test_links_lead_to_files_and_headings_that_are_there() -> None:
    broken = []
    for page in [path for pattern in PAGES for path in ROOT.glob(pattern)]:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if target.startswith(("http:", "https:", "mailto:")):
                continue
            name, _, heading = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            if not path.exists() or (heading and heading not in headings(path)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def headings(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {re.sub(r"[^a-z0-9 _-]", "", title.lower()).replace(" ", "-") for title in titles}
