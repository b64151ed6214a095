"""The command line: which verbs there are, what they print, and how they end."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.modelled import gpt
from tests.unit.ways_fakes import MACHINE, PLACE
from torch_tiers import doctor
from torch_tiers.allocator.nvme.decide import Decided, Decision
from torch_tiers.allocator.nvme.ways import Choice as Chosen
from torch_tiers.allocator.nvme.ways import obstacles
from torch_tiers.cli import doctor as doctor_verb
from torch_tiers.cli.main import VERBS, main
from torch_tiers.config import Config, DramConfig, HbmConfig, NvmeConfig
from torch_tiers.doctor import Finding, TorchFacts, examine
from torch_tiers.migrator.model import trace_json
from torch_tiers.migrator.model.links import links_from
from torch_tiers.migrator.policies import POLICIES
from torch_tiers.monitor.sensors import Choice
from torch_tiers.monitor.sensors.pressure import Pressure
from torch_tiers.topology import Filesystem, Gpu, Memory, Topology

GiB, TiB = 1024**3, 1024**4
CPU = Topology(Memory(32 * GiB, 16 * GiB, None, 8 * 1024**2), (), 2, (), None)
NO_GPU = replace(MACHINE, gpu=None)
H100 = replace(CPU, gpus=(Gpu(0, "H100", 80 * GiB, "0:0", "580"),))
TORCH = TorchFacts("2.13.0", "13.0", sees_gpu=True, loads_tiers=True)
STATS = {
    "device": "cuda:0",
    "allocator": "torch",
    "policy": "auto",
    "budget": {"hbm": 20 * GiB, "dram": None, "nvme": 0},
    "iterations": 10,
    "steps": 10,
    "peak": {"hbm": 15 * GiB, "dram": 4 * GiB, "nvme": 0},
    "moved": {"d2h": 40 * GiB, "h2d": 40 * GiB, "disk_write": 0, "disk_read": 0},
    "groups": 120,
    "stalls": {"disk_read": {"count": 3, "seconds": 0.25}},
    "unmanaged_bytes": 512,
    "step_s": {"median": 0.5, "min": 0.4, "max": 0.75},
    "monitor": {"sensors": ["copies"], "steps": 10, "backed_off": 3, "changes": ["memory bus saturated by others"]},
}


def tiers(*words: str, cwd: Path, stdout=subprocess.PIPE, **environ: str) -> subprocess.CompletedProcess[str]:
    """`tiers` in a process of its own, which `run` needs, as it replaces the process."""
    root = Path(__file__).parents[3]
    return subprocess.run(
        [sys.executable, "-m", "torch_tiers", *words],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "HOME": str(cwd), "PYTHONPATH": str(root), **environ},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


def tiers_in_shell(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[3]
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), "PYTHONPATH": str(root)}
    return subprocess.run(["sh", "-c", command], cwd=cwd, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("words", [["config"], ["config", "--json"]])
def test_an_output_that_cannot_be_written_is_one_line(tmp_path, words):
    with open("/dev/full", "w") as full:
        done = tiers(*words, cwd=tmp_path, stdout=full)
    assert (done.returncode, done.stderr) == (1, "tiers: stdout cannot be written: No space left on device\n")


@pytest.mark.parametrize("words", [["config"], ["config", "--json"]])
def test_a_reader_that_leaves_ends_a_verb_silently(tmp_path, words):
    reading, writing = os.pipe()
    os.close(reading)
    done = tiers(*words, cwd=tmp_path, stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def show(name: str) -> list[str]:
    """A program that prints variables."""
    return ["--", sys.executable, "-c", f"import os; print(os.environ.get({name!r}))"]


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert re.fullmatch(r"torch-tiers \d+\.\d+.*\n", capsys.readouterr().out)


def test_a_verb_that_is_misspelt_is_guessed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["prob", "--json"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("did you mean probe?\n")


@pytest.mark.parametrize(("words", "name"), [(["--hbm", "12XB"], "(--hbm)"), ([], "(environment TIERS_HBM)")])
def test_a_value_that_is_not_accepted_is_called_as_it_was_typed(words, name, capsys, monkeypatch):
    monkeypatch.setenv("TIERS_HBM", "3XB")
    assert main(["run", *words, *show("TIERS_HBM")]) == 2
    assert f"hbm.capacity = '{'12XB' if words else '3XB'}' {name} is not accepted" in capsys.readouterr().err


def test_the_verbs_are_frozen():
    names = ["probe", "run", "config", "doctor", "report", "suggest", "top", "plan", "bench"]
    assert [verb.name for verb in VERBS] == names


def test_without_a_verb_it_prints_its_help(capsys):
    assert main([]) == 0
    assert "usage: tiers" in capsys.readouterr().out


@pytest.mark.parametrize("verb", [verb.name for verb in VERBS])
def test_every_verb_has_help_and_json(verb, capsys):
    with pytest.raises(SystemExit) as end:
        main([verb, "--help"])
    assert end.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_config_run_report_and_plan_do_not_import_torch():
    code = "import sys, torch_tiers.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_config_prints_values_and_origins(capsys, monkeypatch):
    monkeypatch.setenv("TIERS_HBM", "20GiB")
    assert main(["config"]) == 0
    out = capsys.readouterr().out
    assert "20.0 GiB" in out
    assert "environment TIERS_HBM" in out


@pytest.mark.parametrize("allocator", [None, "off"])
def test_config_says_that_values_alone_turn_nothing_on(capsys, monkeypatch, tmp_path, allocator):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiers.toml").write_text('allocator = "torch"\nhbm.capacity = "20GiB"\n')
    if allocator:
        monkeypatch.setenv("TIERS_ALLOCATOR", allocator)
    assert main(["config"]) == 0
    assert "these values turn nothing on" in capsys.readouterr().out
    monkeypatch.setenv("TIERS_ALLOCATOR", "torch")
    assert main(["config"]) == 0
    assert "turn nothing on" not in capsys.readouterr().out


def test_config_as_json_is_exact(capsys, monkeypatch):
    monkeypatch.setenv("TIERS_HBM", "20GiB")
    assert main(["config", "--json"]) == 0
    keys = json.loads(capsys.readouterr().out)["keys"]
    assert keys["hbm.capacity"] == {"value": 20 * GiB, "origin": "environment TIERS_HBM"}


def test_bad_input_is_one_line_and_exit_code_2(capsys, monkeypatch):
    monkeypatch.setenv("TIERS_HBM", "lots")
    assert main(["config"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tiers: hbm.capacity = 'lots'")
    assert captured.err.count("\n") == 1


def test_run_sets_the_environment_of_the_program(tmp_path):
    done = tiers("run", "--hbm", "20GiB", *show("TIERS_HBM"), cwd=tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("20GiB\n", "", 0)


def test_run_turns_tiers_on(tmp_path):
    assert tiers("run", *show("TIERS_ALLOCATOR"), cwd=tmp_path).stdout == "pages\n"


def test_run_takes_the_allocator_of_the_file(tmp_path):
    (tmp_path / "tiers.toml").write_text('allocator = "torch"')
    assert tiers("run", *show("TIERS_ALLOCATOR"), cwd=tmp_path).stdout == "torch\n"


def test_run_joins_nvme_directories(tmp_path):
    (tmp_path / "a").mkdir()
    words = ["run", "--nvme", "1MiB", "--nvme-path", "a", "--nvme-path", ".", *show("TIERS_NVME_PATH")]
    assert tiers(*words, cwd=tmp_path).stdout == "a:.\n"


def test_run_ends_with_the_code_of_the_program(tmp_path):
    assert tiers("run", "--", sys.executable, "-c", "raise SystemExit(7)", cwd=tmp_path).returncode == 7


def test_run_says_what_it_sets_and_leaves_stdout_to_the_program(tmp_path):
    done = tiers("run", "-v", "--policy", "keep", "--", "true", cwd=tmp_path)
    assert done.stdout == ""
    assert done.stderr == "tiers: TIERS_POLICY=keep TIERS_ALLOCATOR=pages true\n"
    done = tiers("run", "--json", "--", "true", cwd=tmp_path)
    assert json.loads(done.stderr) == {"set": {"TIERS_ALLOCATOR": "pages"}, "command": ["true"]}


@pytest.mark.parametrize(
    ("words", "environ", "code", "message"),
    [
        (["run", "--hbm", "lots", "--", "true"], {}, 2, "hbm.capacity = 'lots'"),
        (["run"], {}, 2, "no program to run"),
        (["run", "--allocator", "off", "--", "true"], {}, 2, "without tiers"),
        (["run", "--", "no-such-program"], {}, 127, "no-such-program: no such program"),
        (["run", "--", "."], {}, 126, ".: Permission denied"),
        (["run", "--", "true"], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, 2, "unset it"),
    ],
)
def test_run_that_cannot_start_is_one_line(tmp_path, words, environ, code, message):
    done = tiers(*words, cwd=tmp_path, **environ)
    assert done.returncode == code
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_run_without_tiers_is_for_a_run_directory_which_keeps_the_losses(tmp_path):
    words = ["run", "--allocator", "off", "--run", "plain", *show("TIERS_ALLOCATOR")]
    assert tiers(*words, cwd=tmp_path).stdout == "off\n"
    words = ["run", "--allocator", "off", "--run", "plain", *show("TIERS_RUN")]
    assert tiers(*words, cwd=tmp_path).stdout == f"{tmp_path}/plain\n"


@pytest.mark.parametrize("question", [["--step", "2"], ["--modules"], ["--losses", "other"]])
def test_a_page_answers_no_single_question(tmp_path, capsys, question):
    assert main(["report", str(tmp_path), *question, "--png", str(tmp_path / "figures")]) == 2
    assert "leave --step, --modules and --losses out" in capsys.readouterr().err


def test_without_a_plan_no_module_is_told(tmp_path, capsys):
    (tmp_path / "stats.json").write_text(json.dumps(STATS))
    assert main(["report", str(tmp_path), "--modules"]) == 2
    assert "has no plan to read: the run ended before there was one" in capsys.readouterr().err


def test_run_without_a_stdout_runs_the_program(tmp_path):
    run = [sys.executable, "-m", "torch_tiers", "run", "--", "sh", "-c", "exit 7"]
    done = tiers_in_shell(" ".join(map(shlex.quote, run)) + " >&-", tmp_path)
    assert (done.returncode, done.stderr) == (7, "")


def test_a_name_that_stdout_cannot_write_is_written_as_its_number(tmp_path):
    done = tiers("config", cwd=tmp_path, TIERS_RUN="/räume", PYTHONIOENCODING="ascii", COLUMNS="200")
    assert (done.returncode, done.stderr) == (0, "")
    assert r"/r\xe4ume" in done.stdout


def test_report_does_not_blame_a_missing_gpu_for_steps_before_a_share_was_known(tmp_path, capsys):
    over = STATS | {"device": "cpu", "peak": {"hbm": 2 << 30, "dram": 0, "nvme": 0}, "budget_share": "60%"}
    over |= {"budget": {"hbm": 1 << 30, "dram": 0, "nvme": 0}}
    for stats, why in ((over, "steps before the first plan"), (over | {"budget_share": None}, "without a GPU")):
        (tmp_path / "stats.json").write_text(json.dumps(stats))
        assert main(["report", str(tmp_path)]) == 0
        assert why in " ".join(capsys.readouterr().out.split())


def test_report_prints_what_a_run_did(tmp_path, capsys):
    (tmp_path / "stats.json").write_text(json.dumps(STATS))
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for text in (
        "15.0 GiB",
        "75%",
        "40.0 GiB",
        "4.0 GiB",
        "disk_read",
        "250.0 ms",
        "500.0 ms",
        "512 B",
        "backed off in 3",
    ):
        assert text in out


def test_report_tells_what_our_allocator_did(tmp_path, capsys):
    names = ("maps", "unmaps", "waits", "planned", "mispredicted", "misplaced", "dram")
    pages = dict(zip(names, (9000, 800, 7, 960, 30, 10, 2 * GiB), strict=True))
    (tmp_path / "stats.json").write_text(json.dumps(STATS | {"pages": pages}))
    assert main(["report", str(tmp_path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    said = "96% of 1000 requests lay where they were foreseen; 9000 mapped, 800 unmapped, 7 waits for the device"
    assert f"pages: {said}; 2.0 GiB in dram at the end" in out


@pytest.mark.parametrize("allocator", ["torch", "pages"])
def test_report_tells_how_often_hbm_was_full_and_advises_what_is_not_done_already(tmp_path, capsys, allocator):
    for flushes, said in ((0, False), (12, True)):
        (tmp_path / "stats.json").write_text(json.dumps(STATS | {"flushes": flushes, "allocator": allocator}))
        assert main(["report", str(tmp_path)]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert ("hbm was full 12 times" in out) == said
        assert ("set TIERS_ALLOCATOR=pages" in out) == (said and allocator == "torch")


@pytest.mark.parametrize(
    ("under_the_plan", "said"),
    [(0, "for the device; not once under the last plan"), (3, "3 of them under the last plan; raise TIERS_HBM")],
)
def test_report_does_not_blame_the_budget_for_what_the_first_steps_took(tmp_path, capsys, under_the_plan, said):
    settled = {"iterations": 5, "flushes": under_the_plan, "moved": STATS["moved"], "stalled_s": {}}
    stats = STATS | {"flushes": 12, "allocator": "pages", "settled": settled, "stalls": {}}
    (tmp_path / "stats.json").write_text(
        json.dumps(stats | {"step_s": STATS["step_s"] | {"settled": {"median": 0.4, "steps": 5}}})
    )
    assert main(["report", str(tmp_path)]) == 0
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("settled", "text"),
    [
        ({}, "step 500.0 ms (median, learning included; 400.0 ms to 750.0 ms)"),  # of an earlier version
        ({"settled": {"median": None, "steps": 0}}, "step 500.0 ms (median, learning included; "),
        (
            {"settled": {"median": 0.45, "steps": 7}},
            "step 450.0 ms (median of 7 under the last plan; 400.0 ms to 750.0 ms",
        ),
    ],
)
def test_report_tells_steps_under_the_last_plan_apart(tmp_path, capsys, settled, text):
    (tmp_path / "stats.json").write_text(json.dumps(STATS | {"step_s": STATS["step_s"] | settled}))
    assert main(["report", str(tmp_path)]) == 0
    assert text in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(("iterations", "moved", "stalled"), [(5, "2.0 GiB", "1.0 ms"), (4, "4.0 GiB", "25.0 ms")])
def test_report_tells_what_an_iteration_moves_under_the_last_plan_once_there_were_some(
    tmp_path, capsys, iterations, moved, stalled
):
    """The first iterations move all that is saved, and wait for it: of 20 steps they made up most."""
    lanes = {"d2h": 2 * iterations * GiB, "h2d": 0, "disk_write": 0, "disk_read": 0}
    settled = {"iterations": iterations, "moved": lanes, "stalled_s": {"disk_read": iterations * 1e-3}}
    step = STATS["step_s"] | {"settled": {"median": 0.4, "steps": iterations}}
    (tmp_path / "stats.json").write_text(json.dumps(STATS | {"settled": settled, "step_s": step}))
    assert main(["report", str(tmp_path)]) == 0
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["d2h", "hbm", "to", "dram", "40.0", "GiB", *moved.split()] in rows
    assert ["disk_read", "3", "250.0", "ms", *stalled.split()] in rows


@pytest.mark.parametrize(
    ("staged", "direct", "said"),
    [(0, 0, None), (GiB, 0, "nvme takes 1.0 GiB an iteration, 7.0 TiB an hour"), (GiB, GiB, "2.0 GiB an iteration")],
)
def test_report_tells_what_a_drive_has_to_take(tmp_path, capsys, staged, direct, said):
    """Drives wear: what a step writes adds up over the hours."""
    moved = {"d2h": 0, "h2d": 0, "disk_write": 20 * staged, "disk_read": 0, "gds_write": 20 * direct}
    stats = STATS | {"moved": moved, "iterations": 20}
    (tmp_path / "stats.json").write_text(json.dumps(stats))
    assert main(["report", str(tmp_path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert ("nvme takes" in out) == (said is not None)
    assert said is None or said in out


@pytest.mark.parametrize(
    ("drives", "processes", "told", "said"),
    [
        (1, 1, {"nvme0n1": (50, 84 * TiB)}, "50% of the rated write endurance of nvme0n1 is used, and at this pace"),
        (1, 1, {"nvme0n1": (50, 84 * TiB)}, "the rest lasts for 12 hours"),
        (1, 8, {"nvme0n1": (2, 84 * TiB)}, "the rest lasts for 3 days"),  # 24 with one process
        (2, 1, {"nvme0n1": (1, 84 * TiB), "nvme1n1": (2, 84 * TiB)}, "2% of the rated write endurance of nvme1n1"),
        (2, 1, {"nvme0n1": (1, 84 * TiB), "nvme1n1": (2, 84 * TiB)}, "the rest lasts for 49 days"),
        (2, 1, {"nvme1n1": (2, 84 * TiB)}, "the rest lasts for 49 days"),  # the other does not tell
        (1, 1, {"nvme0n1": (0, GiB)}, "an hour; 0% of the rated write endurance of nvme0n1 is used"),
        (1, 1, {"nvme0n1": (120, TiB)}, "the rest lasts for 0 hours"),
    ],
)
def test_report_tells_for_how_long_drives_are_made_for_that(tmp_path, capsys, drives, processes, told, said):
    moved = {"d2h": 0, "h2d": 0, "disk_write": 20 * GiB, "disk_read": 0}
    each = {name: {"percent": percent, "written": written, "model": "new"} for name, (percent, written) in told.items()}
    worn = {"drives": drives, "processes": processes, "told": each}
    (tmp_path / "stats.json").write_text(json.dumps(STATS | {"moved": moved, "iterations": 20, "worn": worn}))
    assert main(["report", str(tmp_path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert said in out
    assert ("at this pace" in out) == any(percent for percent, _ in told.values())  # else nobody can tell


def test_report_of_a_run_that_never_stepped(tmp_path, capsys):
    idle = {**STATS, "iterations": 0, "steps": 0, "stalls": {}}
    idle["step_s"] = {"median": None, "min": None, "max": None}
    (tmp_path / "stats.json").write_text(json.dumps(idle))
    assert main(["report", str(tmp_path)]) == 0
    assert "no stalls" in capsys.readouterr().out


def test_report_does_without_what_accounts_for_the_plan(tmp_path, capsys, monkeypatch):
    trace = gpt(blocks=2)
    (tmp_path / "stats.json").write_text(json.dumps(STATS))
    (tmp_path / "trace.json").write_text(trace_json.write(trace))
    (tmp_path / "plan.json").write_text(POLICIES["move"](trace, 40 * GiB, links_from({}, disk=False)).to_json())
    assert main(["report", str(tmp_path / "stats.json")]) == 0  # the file will do as well as its directory
    assert "an iteration, as it was predicted" in capsys.readouterr().out
    monkeypatch.setenv("TIERS_HBM", "much")
    assert main(["report", str(tmp_path)]) == 0
    assert "no account of the plan: hbm.capacity" in capsys.readouterr().out
    monkeypatch.delenv("TIERS_HBM")
    (tmp_path / "trace.json").write_text("{}")
    assert main(["report", str(tmp_path)]) == 0
    assert "no account of the plan: " in capsys.readouterr().out


def test_report_as_json_is_the_file(tmp_path, capsys):
    (tmp_path / "stats.json").write_text(json.dumps(STATS))
    assert main(["report", "--json", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == STATS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist; run with TIERS_RUN="),
        ("{", "cannot be read"),
        ("{", "; name a directory that TIERS_RUN named"),
        ("[]", "cannot be read: stats is a list and not an object; name a directory"),
        ("{}", "cannot be read: device is missing; name a directory"),
    ],
)
def test_report_of_no_run_directory_is_one_line(tmp_path, capsys, text, message):
    if text is not None:
        (tmp_path / "stats.json").write_text(text)
    assert main(["report", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_report_of_a_name_that_cannot_be_looked_at_is_one_line(capsys):
    assert main(["report", "x" * 300]) == 2
    err = capsys.readouterr().err
    assert "cannot be read: File name too long; name a directory" in err and err.count("\n") == 1


@pytest.mark.parametrize("verb", [["config"], ["top", "--once"], ["run", "--", "true"]])
@pytest.mark.parametrize("environ", [{"TIERS_LEDGER": "~nosuchuser/x"}, {"TIERS_CONFIG": "x" * 300}])
def test_a_path_that_cannot_be_looked_at_ends_a_verb_in_one_line(verb, environ, capsys, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(verb) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_report_of_a_part_of_a_run_names_the_whole(tmp_path, capsys):
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    assert main(["report", str(plan)]) == 2
    assert "name its directory" in capsys.readouterr().err


def decision(topology: Topology, config: Config, **spoilt) -> Decision:
    """Nothing is direct, for want of nvidia-fs and PCI P2PDMA or of what is spoilt."""
    facts = replace(MACHINE if topology.gpus else NO_GPU, **(spoilt or {"nvidia_fs": False, "p2pdma": False}))
    decided = Decided(PLACE, obstacles(facts, PLACE), {}, Chosen("host", why_not="no module", change="load it"))
    return Decision(facts, dict.fromkeys(config.nvme.paths, decided))


def findings(topology: Topology = H100, config: Config | None = None, torch: TorchFacts | None = TORCH, **spoilt):
    config = config or Config()
    found = examine(topology, config, torch, decision(topology, config, **spoilt))
    return {finding.subject: finding for finding in found}


def test_doctor_looks_at_everything_a_run_depends_on():
    assert list(findings()) == [
        "torch",
        "activation",
        "allocator pages",
        "copies",
        "hooks",
        "gpu",
        "driver",
        "kvikio",
        "GDS",
        "pinning limit",
        "memory",
        "cgroup memory limit",
        "nvme",
        "monitor",
    ]


def test_doctor_says_what_keeps_our_allocator_away():
    lacking = replace(TORCH, obstacle="no C++ compiler found")
    asked = replace(Config(), allocator="pages")
    assert findings()["allocator pages"].status == "ok"
    assert findings(torch=lacking)["allocator pages"].status == "ok"  # nobody asked for it
    assert findings(config=asked, torch=lacking)["allocator pages"].status == "degraded"
    assert "compiler" in findings(config=asked, torch=lacking)["allocator pages"].found


def test_doctor_says_what_keeps_the_hooks_from_being_compiled():
    lacking, asked = replace(TORCH, hooks_obstacle="no headers of Python's found"), replace(Config(), allocator="torch")
    assert findings()["hooks"].status == "ok"
    for machine in (H100, CPU):
        found = findings(machine, config=asked, torch=lacking)["hooks"]
        assert (found.status, found.found) == ("missing", "no headers of Python's found")
        assert "nothing trains with tiers" in found.advice
    assert findings(torch=lacking)["hooks"].status == "degraded", "what is configured, nothing, can run"


def test_doctor_says_what_keeps_copies_from_the_driver():
    lacking, asked = replace(TORCH, lanes_obstacle="libcuda.so.1 was not found"), replace(Config(), allocator="torch")
    assert findings(config=asked)["copies"].status == "ok"
    assert findings(config=asked, torch=lacking)["copies"].status == "missing"
    assert "copies" not in findings(CPU, config=asked, torch=lacking)


def test_doctor_names_the_sensors_and_why_others_are_not_in_use():
    sensors = Choice((Pressure(),), {"resctrl": "not mounted"})
    found = {f.subject: f for f in examine(H100, Config(), TORCH, decision(H100, Config()), sensors)}
    assert found["monitor"].found == "watches own copies, pressure; who else loads the memory bus none of them tells"
    assert found["sensor resctrl"] == Finding("sensor resctrl", "ok", "not in use: not mounted")


def test_a_machine_without_a_gpu_is_degraded_but_nothing_is_missing():
    found = findings(CPU, torch=replace(TORCH, cuda=None, sees_gpu=False))
    assert found["gpu"].status == "degraded"
    assert "missing" not in {finding.status for finding in found.values()}


def test_no_torch_is_missing():
    assert findings(torch=None)["torch"].status == "missing"


def test_a_torch_that_sees_no_gpu_is_told_apart_by_its_build():
    assert "CUDA build" in findings(torch=replace(TORCH, cuda=None, sees_gpu=False))["torch"].advice
    assert "driver" in findings(torch=replace(TORCH, sees_gpu=False))["torch"].advice


def test_an_entry_point_that_is_not_loaded_is_missing():
    assert findings(torch=replace(TORCH, loads_tiers=False))["activation"].status == "missing"


@pytest.mark.parametrize(("mode", "status"), [("prefer", "ok"), ("off", "ok"), ("require", "missing")])
def test_gds_that_is_not_there_weighs_as_much_as_it_is_wanted(mode, status):
    assert findings(config=Config(nvme=NvmeConfig(gds=mode)))["GDS"].status == status


def test_gds_that_is_not_there_says_why_and_what_would_change_that():
    found = findings()["GDS"]
    assert "nvidia-fs is not loaded, and without it the kernel has no PCI P2PDMA" in found.found
    assert found.advice == "load it: modprobe nvidia-fs"
    assert "the machine can" in findings(nvidia_fs=True)["GDS"].found


@pytest.mark.parametrize(("mode", "status"), [("prefer", "ok"), ("require", "missing")])
def test_a_directory_s_way_is_told_and_what_would_change_it(tmp_path, monkeypatch, mode, status):
    monkeypatch.setattr(doctor, "filesystem_of", lambda path: Filesystem("ext4", "/dev/x", None))
    found = findings(config=Config(nvme=NvmeConfig(paths=(tmp_path,), capacity=1, gds=mode)))[f"nvme {tmp_path}"]
    assert "takes O_DIRECT; GPU memory goes through host memory; not direct: no module" in found.found
    assert (found.status, found.advice) == (status, "load it")


def test_gds_is_of_no_use_without_a_gpu_unless_it_is_required():
    assert findings(CPU)["GDS"].status == "ok"
    assert findings(CPU, config=Config(nvme=NvmeConfig(gds="require")))["GDS"].status == "missing"


def test_more_dram_than_there_is_is_degraded():
    found = findings(CPU, config=Config(dram=DramConfig(capacity=17 * GiB)))["memory"]
    assert (found.status, found.advice) == ("degraded", "set dram.capacity to 8.0 GiB or less")
    assert findings(CPU, config=Config(dram=DramConfig(capacity=16 * GiB)))["memory"].status == "ok"


def test_a_pinning_limit_is_told_as_one_that_does_not_bind_what_is_pinned():
    found = "ulimit -l is 8.0 MiB, which does not bind what the NVIDIA driver pins"
    assert findings()["pinning limit"] == Finding("pinning limit", "ok", found)
    unlimited = replace(H100, memory=replace(H100.memory, memlock=None))
    assert findings(unlimited)["pinning limit"].found == "none"


def test_a_drive_with_too_little_room_is_missing(tmp_path):
    config = Config(nvme=NvmeConfig(paths=(tmp_path,), capacity=2**60))
    assert findings(config=config)[f"nvme {tmp_path}"].status == "missing"


def test_doctor_says_how_worn_a_drive_is(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "wear", lambda drive: f"{drive} is old")
    config = Config(nvme=NvmeConfig(paths=(tmp_path,), capacity=1))
    assert "; nvme0n1 is old" in findings(config=config)[f"nvme {tmp_path}"].found


def test_every_finding_that_is_not_ok_says_what_to_do():
    for found in (findings(), findings(CPU), findings(torch=None)):
        assert [f.subject for f in found.values() if f.status != "ok" and not f.advice] == []


@pytest.fixture
def known_machine(monkeypatch):
    monkeypatch.setattr(doctor_verb, "discover", lambda: H100)
    monkeypatch.setattr(doctor_verb, "_torch_facts", lambda: TORCH)


@pytest.mark.usefixtures("known_machine")
def test_doctor_prints_its_findings_and_hints_as_they_are(capsys):
    assert main(["doctor"]) == 0
    assert "'.[cuda13]'" in capsys.readouterr().out.replace("\n", "")


@pytest.mark.usefixtures("known_machine")
def test_doctor_says_that_a_calibration_cannot_be_read(capsys, monkeypatch, tmp_path):
    (tmp_path / "tiers.toml").write_text('[monitor]\ncalibration = "nowhere.json"\n')
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--json"]) == 1
    config = json.loads(capsys.readouterr().out)["findings"][0]
    assert config["status"] == "missing"
    assert "nowhere.json" in config["found"]


@pytest.mark.usefixtures("known_machine")
def test_doctor_examines_the_rest_when_the_configuration_is_wrong(capsys, monkeypatch):
    monkeypatch.setenv("TIERS_HBM", "lots")
    assert main(["doctor", "--json"]) == 1
    found = [Finding(**finding) for finding in json.loads(capsys.readouterr().out)["findings"]]
    assert (found[0].subject, found[0].status) == ("config", "missing")
    assert len(found) > 5


def test_config_says_what_unset_means(capsys, monkeypatch):
    for name in ("TIERS_LEDGER", "TIERS_PLAN_CACHE"):
        monkeypatch.delenv(name)
    assert Config().hbm == HbmConfig(None)
    assert main(["config"]) == 0
    assert "all that is free, less a margin" in capsys.readouterr().out
