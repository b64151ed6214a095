from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.modelled import gpt
from tests.unit.traces import chain
from torch_tiers.allocator.sizes import GiB, MiB, format_size
from torch_tiers.cli.main import main
from torch_tiers.migrator.model import trace_json
from torch_tiers.migrator.model.links import PCIE_GEN5, links_from
from torch_tiers.migrator.policies import MODULES

MODEL = gpt(blocks=6)
GDS = ",gds_write=3e9,gds_read=6e9"


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.json"
    file.write_text(trace_json.write(MODEL))
    return file


def output(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> str:
    assert main(["plan", *map(str, words)]) == code
    return capsys.readouterr().out


def test_policies_stand_side_by_side(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(output(capsys, trace, "--budget", "12GiB", "--policy", "keep,move,auto", "--json"))
    assert data["budget"] == 12 * 1024**3
    assert data["ideal_s"] == pytest.approx(MODEL.seconds)
    assert list(data["policies"]) == ["keep", "move", "auto"]
    keep, auto = data["policies"]["keep"], data["policies"]["auto"]
    assert (keep["fits"], keep["fraction_of_ideal"], keep["moved_bytes"]) == (False, 1.0, 0)
    assert auto["fits"]
    assert 0.9 < auto["fraction_of_ideal"] < 1
    assert auto["peak"]["hbm"] <= data["budget"]


def test_a_trace_may_be_compressed(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = trace.with_suffix(".json.gz")
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    words = "--budget", "12GiB", "--policy", "move", "--json"
    assert json.loads(output(capsys, packed, *words)) == json.loads(output(capsys, trace, *words))
    packed.write_bytes(packed.read_bytes()[:100])
    assert main(["plan", str(packed), *words]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_the_table_has_the_same_numbers(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, trace, "--budget", "12GiB", "--policy", "keep,auto")
    assert "GiB, over" in text
    assert text.index("auto") < text.index("keep")


def test_names_and_numbers_stay_whole_on_80_columns(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = output(capsys, trace, "--budget", "12GiB", "--policy", "all")
    assert "…" not in text
    assert all(f" {name} " in text for name in MODULES)


def test_a_run_directory_will_do(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "auto" in output(capsys, trace.parent, "--budget", "40GiB")


def test_all_means_every_policy(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(output(capsys, trace, "--budget", "12GiB", "--policy", "all", "--json"))
    assert {"auto", "flashneuron", "keep", "move"} <= set(data["policies"])


def test_a_budget_that_no_plan_meets_is_told_and_is_a_failure(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, trace, "--budget", "1GiB", code=1)
    assert "no plan keeps this program within 1.0 GiB" in " ".join(text.split())
    assert "TIERS_HBM" not in text and "peak hbm" not in text  # the variable is a run's, and there is no row
    assert main(["plan", str(trace), "--budget", "1GiB", "--plot", str(trace.with_name("plan.svg"))]) == 1
    assert "there is no plan to draw" in capsys.readouterr().err
    data = json.loads(output(capsys, trace, "--budget", "1GiB", "--json", code=1))
    assert "needs" in data["policies"]["auto"]["error"]


def test_a_policy_that_lacks_its_extra_leaves_the_others_their_rows(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    data = json.loads(output(capsys, trace, "--budget", "12GiB", "--policy", "autotm,keep,auto", "--json"))
    assert data["policies"]["autotm"]["error"] == "the policy autotm needs scipy: pip install scipy"
    assert data["policies"]["auto"]["fits"]


def test_slower_links_make_a_slower_step(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (trace, "--budget", "12GiB", "--policy", "move,auto", "--json")
    fast = json.loads(output(capsys, *words))
    slow = json.loads(output(capsys, *words, "--links", "d2h=5e9,h2d=5e9"))
    assert slow["policies"]["move"]["step_s"] > fast["policies"]["move"]["step_s"]
    assert slow["links"]["d2h"] == 5e9


def test_links_are_those_of_tiers_toml(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiers.toml").write_text("[links]\nd2h = 20e9\ndisk_write = 2e9\ndisk_read = 3e9\n")
    monkeypatch.chdir(tmp_path)
    links = json.loads(output(capsys, trace, "--budget", "40GiB", "--json"))["links"]
    assert (links["d2h"], links["h2d"], links["disk_write"]) == (20e9, PCIE_GEN5.h2d, 2e9)
    assert links["below"] is None, "of what nobody has said there is no number"


def test_what_goes_to_a_drive_directly_leaves_the_memory_bus_alone(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As FlashNeuron's paper has it: the bus is for preprocessing."""
    words = trace, "--budget", "12GiB", "--policy", "flashneuron"
    drive = "disk_write=3e9,disk_read=6e9"
    ways = [json.loads(output(capsys, *words, "--json", "--links", f"{drive}{gds}")) for gds in ("", GDS)]
    staged, direct = (data["policies"]["flashneuron"] for data in ways)
    assert staged["moved_bytes"] == direct["moved_bytes"] > 0
    assert (staged["bus_bytes"], direct["bus_bytes"]) == (2 * staged["moved_bytes"], 0)
    text = output(capsys, *words, "--links", f"{drive}{GDS}")
    assert "over the host's memory bus in an iteration: flashneuron 0 B" in text
    assert "memory bus" not in output(capsys, *words), "without a drive it is what moves, there and back"


def test_auto_moves_no_more_than_dram_holds(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (trace, "--budget", "10GiB", "--json")
    anywhere, held = json.loads(output(capsys, *words)), json.loads(output(capsys, *words, "--dram", "1GiB"))
    assert (anywhere["below"], held["below"]) == (None, GiB)
    assert held["policies"]["auto"]["fits"]
    assert held["policies"]["auto"]["moved_bytes"] < GiB < anywhere["policies"]["auto"]["moved_bytes"]


def test_a_plan_that_moves_more_than_dram_holds_does_not_fit(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (trace, "--budget", "12GiB", "--policy", "move")
    assert ", over" not in output(capsys, *words)
    text = output(capsys, *words, "--dram", "8GiB", code=1)
    assert "into 12.0 GiB of hbm and 8.0 GiB below it" in text
    assert "8.1 GiB, over" in text
    trace.write_text(trace_json.write(replace(MODEL, recipes={})))  # so that only moves free anything
    data = json.loads(output(capsys, trace, "--budget", "12GiB", "--dram", "1GiB", "--json", code=1))
    assert not data["policies"]["auto"]["fits"]


def test_dram_and_nvme_are_those_that_are_configured(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def below(*words: str) -> int:
        return json.loads(output(capsys, trace, "--budget", "40GiB", "--json", *words))["below"]

    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiers.toml").write_text('[dram]\ncapacity = "2GiB"\n')
    assert below() == 2 * GiB
    assert below("--dram", "1GiB") == GiB
    with (tmp_path / "tiers.toml").open("a") as file:
        file.write(f'[nvme]\ncapacity = "3GiB"\npaths = ["{tmp_path}"]\n')
    assert below() == 5 * GiB
    assert below("--dram", "1GiB") == 4 * GiB


@pytest.mark.parametrize(
    ("site", "lines"),
    [
        ("blocks.2.gelu:0", ["256.0 MiB", "to move", "to recompute", "by addmm from"]),
        ("blocks.2.contract:0", ["by gelu from blocks.2.gelu:0", "auto: recomputed by its recipe"]),
    ],
)
def test_a_site_is_explained(trace: Path, capsys: pytest.CaptureFixture[str], site: str, lines: list[str]) -> None:
    text = " ".join(output(capsys, trace, "--budget", "12GiB", "--explain", site).split())
    for line in lines:
        assert line in text


def test_what_is_kept_is_explained_too(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(output(capsys, trace, "--budget", "40GiB", "--explain", "head:0", "--json"))
    assert data["explained"][-1] == "auto: kept, as everything is"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--explain", "blocks.2.gelu:7"], "did you mean blocks.2.gelu:0?"),
        (["--explain", "gelu"], "did you mean blocks.0.gelu:0?"),
        (["--explain", "nothing like it"], "its largest is "),
        (["--plot", "plan.txt"], "a plot is one of"),
    ],
)
def test_errors_are_one_line(trace: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["plan", str(trace), "--budget", "40GiB", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "words", [["--policy", "best"], ["--budget", "much"], ["--links", "d2h=0"], ["--links", "x=1"]]
)
def test_wrong_arguments_are_refused(trace: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", str(trace), "--budget", "40GiB", *words])
    assert end.value.code == 2


@pytest.mark.parametrize("text", ["", "{}", '{"format": 2}', "[]"])
def test_what_is_no_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "trace.json").write_text(text)
    assert main(["plan", str(tmp_path), "--budget", "1GiB"]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "nowhere"), "--budget", "1GiB"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_of_several_processes_one_is_to_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("rank10", "rank2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trace.json").write_text(trace_json.write(MODEL))
    assert main(["plan", str(tmp_path), "--budget", "40GiB"]) == 2
    assert f"name one of {tmp_path}/rank2, {tmp_path}/rank10" in capsys.readouterr().err


def test_a_trace_without_times_tells_of_memory_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace.json").write_text(trace_json.write(chain([40 * MiB] * 20)))
    text = output(capsys, tmp_path, "--budget", "800MiB", "--policy", "keep,flashneuron", "--explain", "layer3:0")
    assert "memory only" in text
    data = json.loads(output(capsys, tmp_path, "--budget", "800MiB", "--policy", "flashneuron", "--json"))
    assert data["policies"]["flashneuron"]["step_s"] is None


@pytest.mark.parametrize("timed", [True, False])
def test_a_plot_is_drawn_and_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str], timed: bool) -> None:
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "trace.json", tmp_path / "plan.svg"
    file.write_text(trace_json.write(MODEL if timed else replace(MODEL, times=(), others=())))
    output(capsys, file, "--budget", "12GiB", "--policy", "auto,keep", "--plot", picture, code=0)
    assert "<svg" in picture.read_text()
    assert main(["plan", str(file), "--budget", "12GiB", "--plot", str(picture)]) == 2
    assert main(["plan", str(file), "--budget", "12GiB", "--plot", str(picture), "--force"]) == 0


def test_a_plot_marks_the_parts_of_the_step_and_tells_each_plan_s_step_and_peak(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import rc_context

    picture = trace.with_name("plan.svg")
    with rc_context({"svg.fonttype": "none"}):  # letters stay letters
        output(capsys, trace, "--budget", "12GiB", "--policy", "auto,keep", "--plot", picture)
    told = json.loads(output(capsys, trace, "--budget", "12GiB", "--policy", "auto,keep", "--json"))["policies"]
    drawn = picture.read_text()
    assert all(f">{part}<" in drawn for part in ("forward", "backward"))
    for name in ("auto", "keep"):
        step, peak = told[name]["step_s"] * 1e3, format_size(told[name]["peak"]["hbm"])
        assert f"{name}: step {step:.1f} ms, peak {peak}" in drawn
    assert "budget 12.0 GiB" in drawn


def test_links_that_were_not_measured_are_taken_for_granted() -> None:
    links = links_from({"d2h": 110e9, "h2d": None}, disk=False)
    assert (links.d2h, links.h2d, links.disk_read) == (110e9, PCIE_GEN5.h2d, 0.0)
    assert PCIE_GEN5.both < links.both < links.d2h + links.h2d
    assert links_from({}, disk=True).disk_write > 0


def test_a_direct_way_is_taken_for_granted_only_where_there_is_one() -> None:
    measured = {"disk_write": 3e9, "gds_write": 6e9, "gds_read": None}
    links = links_from(measured, disk=True, direct=True)
    assert (links.gds_write, links.gds_read) == (6e9, links.disk_read)
    assert not links_from(measured, disk=True).direct, "measured, as on another day, and not there now"
    assert not links_from(measured, disk=False, direct=True).direct


def test_a_plan_for_a_machine_with_a_direct_way_takes_it(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (trace, "--budget", "12GiB", "--policy", "flashneuron,auto", "--json")
    found = json.loads(output(capsys, *words, "--links", "gds_write=6e9,gds_read=11e9"))
    peak = found["policies"]["flashneuron"]["peak"]
    assert (peak["dram"], peak["nvme"] > 0) == (0, True)
    assert main(["plan", str(trace), "--budget", "12GiB", "--links", "gds_write=6e9"]) == 2
    assert "give both gds_write and gds_read" in capsys.readouterr().err


def test_plans_leave_a_part_of_what_is_below_hbm() -> None:
    assert links_from({}, disk=False, below=16 * GiB).below == 15 * GiB
    assert links_from({}, disk=False).below == PCIE_GEN5.below


def test_a_run_directory_that_is_not_there_is_told_from_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(tmp_path / "nope"), "--budget", "3GiB"]) == 2
    assert f"run with TIERS_RUN={tmp_path / 'nope'} to have it written" in capsys.readouterr().err


@pytest.mark.parametrize("varies", [False, True])
def test_where_sizes_change_its_times_are_said_to_be_uncertain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], varies: bool
) -> None:
    (tmp_path / "trace.json").write_text(trace_json.write(replace(MODEL, varies=varies)))
    text = output(capsys, tmp_path, "--budget", "40GiB", "--policy", "keep", code=0)
    assert ("its times are uncertain" in " ".join(text.split())) == varies
