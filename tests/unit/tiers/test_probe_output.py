"""What a report turns into: JSON, a table, a chart, and links in tiers.toml."""

from __future__ import annotations

import io
import json
import stat
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
from rich.console import Console

from tests.unit.probe_fakes import GB, full_report, report, result
from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.sizes import GiB, KiB, MiB
from torch_tiers.config import LinksConfig, load
from torch_tiers.probe import plot
from torch_tiers.probe.links import measured_links, write_links
from torch_tiers.probe.results import to_json
from torch_tiers.probe.table import render, short_size

SCHEMA = json.loads(files("torch_tiers.probe").joinpath("schema.json").read_text())
LINKS = LinksConfig(d2h=55e9, h2d=54e9, disk_write=3e9, disk_read=2.5e9)


def text_of(some: object, width: int = 120) -> str:
    console = Console(width=width, file=io.StringIO())
    for part in render(some):
        console.print(part)
    return console.file.getvalue()


# -------------------------------------------------------------------------------------------- JSON


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("some", [full_report(), report()])
def test_a_report_validates(some: object) -> None:
    jsonschema.validate(json.loads(json.dumps(to_json(some))), SCHEMA)


def test_what_is_not_of_the_schema_does_not_validate() -> None:
    data = json.loads(json.dumps(to_json(full_report())))
    data["results"][0]["samples"] = []  # measured, yet without a number
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, SCHEMA)


def test_json_has_every_run_and_the_bandwidth() -> None:
    (first, *_) = to_json(full_report())["results"]
    assert first["samples"][1]["bandwidth"] == pytest.approx(55 * GB)
    assert len(first["samples"][1]["seconds"]) == 1


# ------------------------------------------------------------------------------------------- table


def test_the_table_shows_bandwidth_by_size_and_under_load() -> None:
    text = text_of(full_report())
    assert "d2h hbm0>dram0" in text
    assert "55.0" in text
    assert "45.0 (98)" in text


def test_ten_sizes_fit_into_80_columns_and_names_stay_whole() -> None:
    rates = {4**power * KiB: 55 * GB for power in range(1, 10)} | {GiB: 1055 * GB / 10}
    text = text_of(report(result("disk_write", rates), result("d2h", rates)), width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    words = text.split()
    assert {"disk_write", "dram0>nvme", "hbm0>dram0"} <= set(words)


def test_the_header_tells_versions_link_clock_drive_and_gds() -> None:
    text = text_of(full_report())
    for word in ("torch 2.11", "driver 580", "generation 5", "x16", "1980", "ext4 on nvme0n1", "GDS: not in use"):
        assert word in text


def test_what_did_not_run_is_said_with_its_reason() -> None:
    text = text_of(full_report())
    assert "waived: gds_write hbm0>nvme: no nvidia-fs" in text
    assert "failed: hbm_write.compat hbm0>nvme: the drive is gone" in text
    assert "stopped before 1.0 GiB" in text


@pytest.mark.parametrize(("nbytes", "text"), [(4 * KiB, "4K"), (16 * MiB, "16M"), (GiB, "1G"), (1000, "1000")])
def test_columns_are_named_shortly(nbytes: int, text: str) -> None:
    assert short_size(nbytes) == text


# -------------------------------------------------------------------------------------------- plot


def test_a_chart_has_a_line_per_path_over_size_and_over_traffic() -> None:
    results = full_report().results
    assert [line.label for line in plot.by_size(results)][:2] == ["d2h hbm0>dram0", "h2d dram0>hbm0"]
    (loaded,) = plot.by_traffic(results)
    assert (loaded.x, loaded.y) == ((0.0, 98.0), (55.0, 45.0))


def test_a_chart_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.draw(full_report(), tmp_path / "out.svg")
    assert "<svg" in (tmp_path / "out.svg").read_text()


def test_a_plot_that_could_not_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: object())
    there = tmp_path / "there.png"
    there.touch()
    for path, word in ((there, "--force"), (tmp_path / "x.gif", ".svg"), (tmp_path / "no" / "x.svg", "directory")):
        with pytest.raises(TiersError, match=word):
            plot.check(path, force=False)
    plot.check(there, force=True)


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(TiersError, match="pip install matplotlib"):
        plot.check(tmp_path / "x.svg", force=False)


# ------------------------------------------------------------------------------------------- links


def test_a_link_is_the_peak_of_the_sizes_from_16_mib_on() -> None:
    sizes = {MiB: 99 * GB, 16 * MiB: 50 * GB, 64 * MiB: 55 * GB, GiB: 54 * GB}
    assert measured_links(report(result("d2h", sizes))) == LinksConfig(d2h=55e9)


def test_a_link_without_a_large_size_is_not_measured() -> None:
    assert measured_links(report(result("d2h", {MiB: 50 * GB}))) == LinksConfig()


def test_the_slowest_gpu_counts_with_its_best_node() -> None:
    speeds = {(0, 0): 55, (0, 1): 40, (1, 0): 38, (1, 1): 50}
    results = [result("d2h", {GiB: speed * GB}, gpu=gpu, node=node) for (gpu, node), speed in speeds.items()]
    assert measured_links(report(*results)).d2h == 50e9


def test_a_report_goes_through_the_file_into_the_configuration(tmp_path: Path) -> None:
    links = measured_links(full_report())
    assert links == LINKS
    write_links(tmp_path / "tiers.toml", links, force=False)
    assert load(environ={}, cwd=tmp_path).config.links == links


def test_only_links_change(tmp_path: Path) -> None:
    file = tmp_path / "tiers.toml"
    before = """\
# mine
allocator   = "pages"   # odd   spacing

[links]                 # measured
h2d = 1.0               # old
[dram]
capacity = "64GiB"
"""
    file.write_text(before)
    file.chmod(0o600)
    write_links(file, LinksConfig(h2d=54e9), force=True)
    assert file.read_text() == before.replace("h2d = 1.0 ", "h2d = 54000000000 ")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert load(environ={}, cwd=tmp_path).config.links == LinksConfig(h2d=54e9)


def test_measured_values_are_overwritten_by_force_only(tmp_path: Path) -> None:
    file = tmp_path / "tiers.toml"
    file.write_text("links.d2h = 1.0\n")
    with pytest.raises(TiersError, match=r"d2h.*--force"):
        write_links(file, LINKS, force=False)
    assert file.read_text() == "links.d2h = 1.0\n"
    write_links(file, LINKS, force=True)
    assert load(environ={}, cwd=tmp_path).config.links == LINKS


def test_other_links_need_no_force_and_stay(tmp_path: Path) -> None:
    file = tmp_path / "tiers.toml"
    file.write_text("[links]\nd2h = 1e9\n")
    assert write_links(file, LinksConfig(h2d=2e9), force=False) == ["h2d"]
    assert load(environ={}, cwd=tmp_path).config.links == LinksConfig(d2h=1e9, h2d=2e9)


@pytest.mark.parametrize("text", ["links = 3\n", "[links\n"])
def test_a_file_that_is_wrong_is_left_alone(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tiers.toml"
    file.write_text(text)
    with pytest.raises(TiersError, match=str(file)):
        write_links(file, LINKS, force=True)
    assert file.read_text() == text
    assert list(tmp_path.iterdir()) == [file]


def test_a_probe_that_measured_no_link_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(TiersError, match=r"16 MiB or more; have --paths name some of .* tiers doctor"):
        write_links(tmp_path / "tiers.toml", LinksConfig(), force=False)
    assert list(tmp_path.iterdir()) == []
