"""Programs of the zoo are run, their reports are drawn, and a browser finds no figure empty and asks nobody else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.unit.browser import installed, page
from torch_tiers.cli.main import main

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[3]
PROGRAMS = ("gpt", "swin", "lstm")
STEPS = 12
FIGURES = ("memory", "groups", "lanes", "prediction", "steps", "budgets")
SHARE = 0.0003  # of a figure's pixels that have a colour: axes and words are black and grey
LEGEND = 35  # rows of pixels at a figure's top
BOX = "(({x, y, width, height}) => ({x: x + scrollX, y: y + scrollY, width, height}))(%s.getBoundingClientRect())"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The report of each program, of which everything moves, so that no figure lacks data."""
    directory = tmp_path_factory.mktemp("reports")
    own = {"TIERS_ALLOCATOR": "torch", "TIERS_POLICY": "move", "TIERS_HBM": "4MiB", "TIERS_PLAN_CACHE": "0"}

    def run(name: str) -> None:
        environ = {**os.environ, **own, "TIERS_RUN": str(directory / name)}
        command = [sys.executable, "-m", "benchmarks.zoo.run", name, "--size", "cpu", "--steps", str(STEPS)]
        subprocess.run(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, check=True)

    with ThreadPoolExecutor(2) as both:
        list(both.map(run, PROGRAMS))
    pages = {name: directory / f"{name}.html" for name in PROGRAMS}
    for name, file in pages.items():
        assert main(["report", str(directory / name), "-o", str(file)]) == 0
    return pages


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_report_of_a_program_has_every_figure(reports: dict[str, Path], name: str) -> None:
    text = reports[name].read_text()
    found = dict(re.findall(r'<section id="(\w+)">(.*?)</section>', text, re.DOTALL))
    assert [each for each in FIGURES if "<svg" not in found[each] and "<img" not in found[each]] == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_in_a_browser_no_figure_is_empty_and_nobody_else_is_asked(
    reports: dict[str, Path], name: str, tmp_path: Path
) -> None:
    browser = installed()
    if browser is None:
        pytest.skip("no Chromium is installed, neither on the path nor by playwright")
    with page(browser, tmp_path / "profile") as shown:
        assert shown.open(reports[name]) == []
        shown.screenshot(tmp_path / f"{name}.png")
        assert shown.evaluate("document.title") == f"tiers report {name}"
        drawn = {each: f"document.querySelector('#{each} svg, #{each} img')" for each in FIGURES}
        for each, element in drawn.items():
            box = json.loads(shown.evaluate(f"JSON.stringify({BOX % element})"))
            assert box["width"] > 500 and box["height"] > 100, each
            shown.screenshot(tmp_path / f"{each}.png", box)
            assert coloured(tmp_path / f"{each}.png") > SHARE, f"{each} is empty"
    print(f"screenshots are in {tmp_path}")


def coloured(picture: Path) -> float:
    """The share of a picture's pixels that are neither black nor grey nor white, below the legend."""
    from matplotlib.image import imread

    pixels = imread(picture)[LEGEND:, :, :3]
    return float(np.mean(np.ptp(pixels, axis=-1) > 0.15))


def test_a_figure_with_its_axes_alone_is_empty(tmp_path: Path) -> None:
    from torch_tiers.planning.html import drawn
    from torch_tiers.planning.html.axes import blank

    with drawn.styled():
        figure = blank(3.0)
        figure.add_subplot().set(xlabel="step", ylabel="ms")
        (tmp_path / "empty.png").write_bytes(drawn.png(figure))
    assert coloured(tmp_path / "empty.png") < SHARE
