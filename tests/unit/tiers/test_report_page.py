"""`tiers report -o`: one file with all about a run, which asks for nothing else."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.numbers_of_a_run import STATS
from tests.unit.quick import quickest
from torch_tiers.allocator.sizes import KiB, MiB
from torch_tiers.cli.main import main
from torch_tiers.migrator.model import trace_json
from torch_tiers.migrator.model.links import PCIE_GEN5
from torch_tiers.migrator.policies import POLICIES
from torch_tiers.planning.html import drawn
from torch_tiers.planning.html.tables import MOST_CHARACTERS, MOST_ROWS, html
from torch_tiers.run_directory import FILES, PLAN, TIMELINE, TRACE
from torch_tiers.run_directory import STATS as NUMBERS

RUN = Path(__file__).parents[2] / "data/runs/mlp"
FIGURES = ("memory", "groups", "lanes", "prediction", "steps", "budgets")
EVENTS = 1_000_000
SECONDS = 10.0  # of the processor

pytest.importorskip("matplotlib")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy of a run, to spoil."""
    shutil.copytree(RUN, tmp_path / "run")
    return tmp_path / "run"


def page(run: Path, *words: str) -> str:
    file = run.parent / "report.html"
    assert main(["report", str(run), "-o", str(file), "--force", *words]) == 0
    return file.read_text()


def section(text: str, name: str) -> str:
    found = re.search(rf'<section id="{name}".*?</section>', text, re.DOTALL)
    assert found is not None, name
    return found[0]


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert main(["report", *map(str, words)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


# -------------------------------------------------------------------------------------------- what is on it


def test_the_run_that_is_committed_is_small_and_whole() -> None:
    assert sorted(path.name for path in RUN.iterdir()) == sorted(FILES)
    assert sum(path.stat().st_size for path in RUN.iterdir()) < 200 * KiB


def test_a_run_with_all_files_has_every_section_with_a_figure(run: Path) -> None:
    text = page(run)
    for name in FIGURES:
        assert "<svg" in section(text, name), name
        assert f'href="#{name}"' in text
    assert text.count('id="tables"') == 1


def test_it_begins_with_the_answer_and_ends_with_the_tables(run: Path) -> None:
    text = page(run)
    assert "an iteration is predicted to need 85.3 MiB of hbm" in section(text, "answer")
    assert text.index('id="answer"') < min(text.index(f'<section id="{name}"') for name in FIGURES)
    tables = section(text, "tables")
    for title in ("tiers", "lanes", "stalls", "saved tensors, by the last plan", "an iteration, as it was predicted"):
        assert f"<caption>{title}</caption>" in tables
    assert "<td>d2h</td>" in tables


def test_it_asks_for_nothing_else(run: Path) -> None:
    text = page(run)
    assert "default-src 'none'" in text
    assert "<script" not in text
    assert set(re.findall(r'(?:src|href|url)\s*[=(]\s*["\']?([^#"\'\s])', text)) <= {"d"}  # data:
    addresses = re.findall(r'(\S*)=["\'](https?://[^"\']*)', text)
    assert {name for name, _ in addresses} <= {"xmlns", "xmlns:xlink"}
    assert len(re.findall("https?://", text)) == len(addresses)


def test_ids_are_those_of_one_element(run: Path) -> None:
    ids = re.findall(r'\bid="([^"]*)"', page(run))
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]*)"', page(run))) <= set(ids)


def test_it_is_small(run: Path) -> None:
    assert len(page(run).encode()) < MiB // 2


def test_it_is_the_same_for_the_same_run_in_another_process(run: Path) -> None:
    file, other = page(run), run.parent / "other.html"
    (run.parent / "matplotlibrc").write_text("font.size: 30\nlines.linewidth: 7\n")
    command = [sys.executable, "-m", "torch_tiers", "report", str(run), "-o", str(other)]
    subprocess.run(command, cwd=run.parent, env={**os.environ, "PYTHONHASHSEED": "77"}, check=True)
    assert other.read_text() == file


# --------------------------------------------------------------------------------- what a run may not have


def test_a_run_without_a_plan_says_so_in_place_of_figures(run: Path) -> None:
    (run / PLAN).unlink()
    text = page(run)
    assert "the run left no plan" in section(text, "answer")
    for name in ("memory", "groups", "lanes", "prediction", "budgets"):
        assert "The run left no plan" in section(text, name)
        assert "<svg" not in section(text, name)
    assert "<svg" in section(text, "steps")


@pytest.mark.parametrize(
    "content",
    [None, b"no gzip", gzip.compress(b"{}"), gzip.compress(b'{"traceEvents": []}')],
    ids=["no file", "no gzip", "no events", "an empty list"],
)
def test_a_run_without_steps_says_so(run: Path, content: bytes | None) -> None:
    (run / TIMELINE).unlink() if content is None else (run / TIMELINE).write_bytes(content)
    text = section(page(run), "steps")
    assert "<svg" not in text
    assert re.search("<p>The t[^<]*</p>|<p>The run left no timeline", text)


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_without_times_memory_is_drawn_by_position(run: Path) -> None:
    change(run / TRACE, times=[], seconds=0)
    text = page(run)
    assert "position in the iteration" in section(text, "memory")
    for name in ("groups", "lanes", "budgets"):
        assert "The trace has no times" in section(text, name)
    assert "No time is predicted" in section(text, "prediction")


def test_a_plan_that_moves_nothing_has_no_groups(run: Path) -> None:
    trace = trace_json.read((run / TRACE).read_text())
    (run / PLAN).write_text(POLICIES["keep"](trace, trace.saved_bytes, PCIE_GEN5).to_json())
    text = page(run)
    assert "The last plan moves nothing" in section(text, "groups")
    assert "no lane is busy" in section(text, "lanes")


def test_where_sizes_change_no_time_is_predicted(run: Path) -> None:
    change(run / TRACE, varies=True)
    assert "No time is predicted, as sizes change" in section(page(run), "prediction")


def test_numbers_of_a_gpu_without_its_plan_are_enough(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / NUMBERS).write_text(json.dumps(STATS))
    assert "the budget was 20.0 GiB" in section(page(tmp_path / "run"), "answer")


def test_what_dram_does_not_hold_is_drawn_on_the_drive(run: Path) -> None:
    assert "nvme" not in section(page(run), "groups")
    change(run / NUMBERS, budget={"hbm": 50 * MiB, "dram": 16 * MiB, "nvme": 1024 * MiB})
    text = page(run)
    assert "nvme" in section(text, "groups")
    assert "disk_write" in section(text, "lanes")


# -------------------------------------------------------------------------------------- others' text, and much


def test_text_of_others_is_text(run: Path) -> None:
    change(run / NUMBERS, policy="<script>alert(1)</script>", allocator='"><img src=x>\x1b[31m')
    assert "<script" not in (text := page(run))
    assert "<img src=x" not in text
    assert "\x1b" not in text


def test_of_what_is_long_the_beginning_is_shown() -> None:
    lines = [*html(["x" * 10_000, *("line" for _ in range(10_000))])]
    assert len(lines) == MOST_ROWS + 1
    assert len(lines[0]) < MOST_CHARACTERS + 20
    assert "9801 lines more" in lines[-1]


def test_a_timeline_of_a_million_events_is_read_and_drawn_in_time_and_room(run: Path) -> None:
    events = [
        {"name": f"step {number}", "cat": "steps", "ts": number * 1e4, "ph": "X", "dur": 1e4 + number % 97, "args": {}}
        if number % 10 == 0
        else {"name": "d2h", "cat": "d2h", "ts": number * 1e4, "ph": "X", "dur": 151.2, "args": {"bytes": 1 << 22}}
        for number in range(EVENTS)
    ]
    (run / TIMELINE).write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode(), 1))
    assert quickest(lambda: page(run), SECONDS) < SECONDS
    text = (run.parent / "report.html").read_text()
    assert len(section(text, "steps")) < drawn.MOST + KiB
    assert len(text) < MiB
    assert f"Of {EVENTS // 10} steps the shortest and the longest" in section(text, "steps")


def test_a_figure_that_is_large_as_svg_is_a_png(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn, "MOST", 1)
    text = page(run)
    assert text.count('src="data:image/png;base64,') == len(FIGURES)
    assert "<svg" not in text


# ------------------------------------------------------------------------------------------------- the files


def test_the_figures_are_written_as_pictures_too(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures = run.parent / "new" / "pictures"
    assert main(["report", str(run), "--png", str(pictures)]) == 0
    assert sorted(path.name for path in pictures.iterdir()) == sorted(f"{name}.png" for name in FIGURES)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures.iterdir())
    assert capsys.readouterr().out.count(".png: ") == len(FIGURES)
    assert "memory.png exists; --force replaces it" in refused(capsys, run, "--png", pictures)


def test_json_is_printed_as_without_a_page(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--json"]) == 0
    said = capsys.readouterr().out
    page(run, "--json")
    assert capsys.readouterr().out == said


def test_a_page_is_not_overwritten_unasked(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run.parent / "report.html"
    file.write_text("mine")
    assert "exists; --force replaces it" in refused(capsys, run, "-o", file)
    assert file.read_text() == "mine"


@pytest.mark.parametrize("file", ["nowhere/report.html", "run", f"{'x' * 300}.html"])
def test_a_page_that_cannot_be_written_is_one_line(run: Path, capsys: pytest.CaptureFixture[str], file: str) -> None:
    refused(capsys, run, "-o", run.parent / file)


def test_without_matplotlib_the_error_names_the_extra(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawn, "find_spec", lambda name: None)
    assert "pip install 'torch-tiers[plot]'" in refused(capsys, run, "-o", run.parent / "report.html")


def test_without_a_page_nothing_of_matplotlib_is_imported() -> None:
    code = (
        f"import sys; from torch_tiers.cli.main import main; main(['report', {str(RUN)!r}]); "
        "sys.exit('matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0
