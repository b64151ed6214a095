"""What users do: a plain program under TIERS_ALLOCATOR, its run directory, and what it says when it cannot run."""

from __future__ import annotations

import json
import subprocess
import tempfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.unit import warm
from torch_tiers.allocator.sizes import MiB, format_at_least, parse_size
from torch_tiers.session import session

ROOT = Path(__file__).parents[3]

# `import torch` calls the gate where the package is installed. So that these tests do not depend on that, it is
# called by hand, right after, and PyTorch's own call is switched off; one test below has it the way users do.
BY_HAND = """
import torch
from torch_tiers.autoload import gate
gate()
"""
PROGRAM = """
import os, sys
import torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(i):
    x = torch.randn(2048, 256, generator=torch.Generator().manual_seed(i))
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item().hex(), flush=True)
"""
START = BY_HAND + PROGRAM
TRAIN = START + "\nfor i in range(6):\n    step(i)\n"

WEIGHTS = 4 * (256 * 256 + 256) * 4
SMALL = str(2 * WEIGHTS + 8 * MiB)  # weights and gradients, and half of what is saved


def python(code: str, **environ: object) -> subprocess.CompletedProcess[str]:
    base = {
        "PATH": "/usr/bin:/bin",
        "XDG_CONFIG_HOME": "/nonexistent",
        "PYTHONPATH": str(ROOT),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    with tempfile.TemporaryDirectory() as ledger:
        own = {key: str(value) for key, value in environ.items()}
        return warm.run(code, env=base | {"TIERS_LEDGER": ledger} | own)


def tiered(code: str, **environ: object) -> subprocess.CompletedProcess[str]:
    return python(code, **{"TIERS_ALLOCATOR": "torch", "TIERS_DRAM": "64MiB", **environ})


def stats_of(directory: Path) -> dict[str, object]:
    return json.loads((directory / "stats.json").read_text())


def names(value: object) -> object:
    return {name: names(below) for name, below in value.items()} if isinstance(value, dict) else type(value).__name__


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run within a small budget."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    plain, ours = python(TRAIN), tiered(TRAIN, TIERS_HBM=SMALL, TIERS_RUN=directory)
    assert plain.returncode == ours.returncode == 0, ours.stderr
    assert ours.stdout == plain.stdout
    assert ours.stderr == ""
    return directory


def test_a_program_prints_the_same_losses_and_moves(run: Path) -> None:
    assert stats_of(run)["moved"]["h2d"] > 0


def test_with_keep_nothing_moves(tmp_path: Path) -> None:
    """Nor while the first iterations are recorded, which would have the allocator see another program."""
    done = tiered(TRAIN, TIERS_POLICY="keep", TIERS_HBM=SMALL, TIERS_RUN=tmp_path)
    assert done.returncode == 0, done.stderr
    assert stats_of(tmp_path)["iterations"] == 6
    assert not any(stats_of(tmp_path)["moved"].values())


@pytest.mark.skipif(
    not any(point.value == "torch_tiers.autoload:gate" for point in entry_points(group="torch.backends")),
    reason="the package is not installed, so PyTorch does not know of it",
)
def test_one_variable_is_enough_where_the_package_is_installed(tmp_path: Path) -> None:
    program = PROGRAM + "\nfor i in range(4):\n    step(i)\n"
    plain = python(program)
    ours = tiered(program, TIERS_HBM=SMALL, TIERS_RUN=tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD=1)
    assert plain.returncode == ours.returncode == 0, ours.stderr
    assert ours.stdout == plain.stdout
    assert stats_of(tmp_path)["steps"] == 4


def test_the_names_in_stats_json_are_these(run: Path) -> None:
    stats = stats_of(run)
    stall = {"count": "int", "seconds": "float"}
    settled = {"median": "float", "low": "float", "high": "float", "steps": "int"}
    lanes = ("d2h", "h2d", "disk_write", "disk_read", "gds_write", "gds_read")
    assert set(stats["stalls"]) <= set(lanes)
    assert set(stats["settled"]["stalled_s"]) == set(stats["stalls"])
    stats["stalls"] = {"h2d": stats["stalls"]["h2d"]}
    stats["settled"]["stalled_s"] = {"h2d": stats["settled"]["stalled_s"]["h2d"]}
    assert names(stats) == {
        "device": "str",
        "allocator": "str",
        "policy": "str",
        "budget": {"hbm": "int", "dram": "int", "nvme": "int"},
        "budget_share": "NoneType",
        "iterations": "int",
        "steps": "int",
        "peak": {"hbm": "int", "dram": "int", "nvme": "int"},
        "moved": dict.fromkeys(lanes, "int"),
        "groups": "int",
        "flushes": "int",
        "demoted": "int",
        "state_in_dram": "int",
        "state_on_nvme": "int",
        "state_in_place": "int",
        "overflow": "int",
        "corrections": {"links": {}, "calls": dict.fromkeys(("group", "moved", "remade"), "float")},
        "bounced": "int",
        "stalls": {"h2d": stall},
        "settled": {
            "iterations": "int",
            "flushes": "int",
            "moved": dict.fromkeys(lanes, "int"),
            "stalled_s": {"h2d": "float"},
        },
        "unmanaged_bytes": "int",
        "step_s": {"median": "float", "min": "float", "max": "float", "settled": settled},
        "host_memory": {
            "shortages": "int",
            "shortest": "NoneType",
            "fullest": {"wanted": "int", "held": "int", "by_others": "int", "others": "list"},
            "no_room": "str",
        },
        "pages": "NoneType",
        "monitor": {"sensors": "list", "steps": "int", "backed_off": "int", "changes": "list"},
    }


def test_the_numbers_in_stats_json_are_the_run_s(run: Path) -> None:
    stats = stats_of(run)
    assert (stats["device"], stats["allocator"], stats["policy"]) == ("cpu", "torch", "auto")
    assert stats["budget"] == {"hbm": int(SMALL), "dram": 64 * MiB, "nvme": 0}
    assert stats["steps"] == stats["iterations"] == 6
    assert 0 < stats["peak"]["hbm"] <= int(SMALL)
    step = stats["step_s"]
    assert step["min"] <= step["median"] <= step["max"]
    assert step["min"] <= step["settled"]["median"] <= step["max"] and 0 < step["settled"]["steps"] < 5
    assert 0 < stats["settled"]["iterations"] < 6 and 0 < stats["settled"]["moved"]["h2d"] < stats["moved"]["h2d"]


def test_a_second_run_into_a_directory_is_refused_unless_forced(run: Path) -> None:
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    refused = tiered(TRAIN, TIERS_RUN=run)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.count("\n") == 1
    assert str(run) in refused.stderr
    assert "TIERS_RUN_FORCE=1" in refused.stderr
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    assert tiered(TRAIN, TIERS_RUN=run, TIERS_RUN_FORCE=1).returncode == 0
    after = {path.name: path.read_bytes() for path in run.iterdir()}
    assert after.keys() == before.keys()
    assert [name for name in before if after[name] == before[name]] == ["losses.csv"]


def test_stats_are_written_after_an_exception(tmp_path: Path) -> None:
    done = tiered(START + "step(0)\nstep(1)\nraise ArithmeticError('nan')", TIERS_RUN=tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith("ArithmeticError: nan\n")
    assert stats_of(tmp_path)["steps"] == 2
    assert (tmp_path / "timeline.json.gz").exists()


def test_a_run_directory_that_cannot_be_written_at_the_end_is_one_line(tmp_path: Path) -> None:
    done = tiered(START + "step(0)\nopen(os.environ['TIERS_RUN'], 'w')", TIERS_RUN=tmp_path / "run")
    lost = "the numbers of this run are lost: name a writable directory"
    said = f"tiers: TIERS_RUN: {tmp_path}/run cannot be written: File exists; {lost}\n"
    assert (done.returncode, done.stderr) == (0, said)


def test_an_exit_code_of_the_program_stays(tmp_path: Path) -> None:
    assert tiered(START + "step(0)\nsys.exit(7)", TIERS_RUN=tmp_path).returncode == 7
    assert stats_of(tmp_path)["steps"] == 1


def test_each_rank_writes_into_a_directory_of_its_own(tmp_path: Path) -> None:
    for rank in range(2):
        done = tiered(TRAIN, TIERS_RUN=tmp_path, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2)
        assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank1"]
    # What is below HBM is the node's, shared by its ranks.
    assert stats_of(tmp_path / "rank0")["budget"]["dram"] == 64 * MiB


def test_a_trainer_that_was_forked_is_told_that_it_trains_without() -> None:
    fork = """
import os
child = os.fork()
if child:
    os.waitpid(child, 0)
else:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    os._exit(0)
"""
    done = tiered(BY_HAND + fork, TIERS_HBM=SMALL)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "forked" in line] == [
        "tiers: tiers is off in this process, which was forked: have trainers started by spawn, or by torchrun"
    ]


IN_A_FORK = """
import signal

def backward_in_a_fork(loss):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends it, should it wait for ever
        try:
            loss.backward()
            os.write(1, b"backward went through\\n")
        except BaseException as error:
            os.write(1, f"{type(error).__name__}: {error}\\n".encode())
        os._exit(0)
    os.waitpid(child, 0)

for i in range(3):
    step(i)
loss = model(torch.randn(2048, 256)).square().mean()
backward_in_a_fork(loss)
loss.backward()
optimizer.step()
print("the parent went on")
"""


def test_a_fork_is_told_that_it_cannot_bring_back_what_its_parent_has_moved() -> None:
    """The threads that would are its parent's: it waited for them for ever."""
    done = tiered(START + IN_A_FORK, TIERS_HBM=SMALL, TIERS_POLICY="move")
    assert done.returncode == 0, done.stderr
    *_, child, parent = done.stdout.splitlines()
    assert child.startswith("TiersError: backward needs a saved tensor that lies in dram or nvme")
    assert "cannot be brought back in a forked process" in child
    assert parent == "the parent went on"


@pytest.mark.parametrize("policy", ["keep", "move"])
def test_a_fork_goes_backward_through_what_has_not_left(policy: str) -> None:
    done = tiered(START + IN_A_FORK, TIERS_HBM="1GiB", TIERS_POLICY=policy)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["backward went through", "the parent went on"]


def test_a_fork_that_exits_writes_nothing_and_ends(tmp_path: Path) -> None:
    """It runs the handlers of a session that belongs to its parent, whose threads it does not have."""
    (tmp_path / "nvme").mkdir()
    fork = """
step(0); step(1)
if os.fork() == 0:
    sys.exit(0)
_, status = os.wait()
assert status == 0 and not os.path.exists(os.environ["TIERS_RUN"])
step(2)
"""
    disk = {"TIERS_DRAM": "4MiB", "TIERS_NVME": "64MiB", "TIERS_NVME_PATH": tmp_path / "nvme"}
    done = tiered(START + fork, TIERS_HBM=SMALL, TIERS_RUN=tmp_path / "run", **disk)
    assert done.returncode == 0, done.stderr
    assert stats_of(tmp_path / "run")["steps"] == 3


def test_a_program_that_trains_nothing_writes_nothing(tmp_path: Path) -> None:
    done = tiered(START + "with torch.no_grad(): model(torch.zeros(1, 256))", TIERS_RUN=tmp_path / "run")
    assert done.returncode == 0
    assert "there is no report" in done.stderr  # though one was asked for
    assert not (tmp_path / "run").exists()


def test_spawned_workers_leave_the_run_to_the_program(tmp_path: Path) -> None:
    """They import the script anew, gate and all, and use modules that could train."""
    script = tmp_path / "script.py"
    script.write_text(
        START
        + """
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return model(torch.full((256,), float(i))).detach()

if __name__ == "__main__":
    for i, x in enumerate(DataLoader(Data(), num_workers=1, multiprocessing_context="spawn")):
        step(i)
"""
    )
    start = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    done = tiered(start, TIERS_RUN=tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("0x") == 4
    assert stats_of(tmp_path / "run")["steps"] == 4


@pytest.mark.parametrize(("budget", "said"), [("500KiB", "500.0 KiB"), ("0.75MiB", "768.0 KiB")])
def test_a_budget_below_weights_too_large_to_be_streamed_says_how_much_they_need(budget: str, said: str) -> None:
    done = tiered(TRAIN, TIERS_HBM=budget)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert f"hbm is {said}, " in done.stderr
    assert parse_size(format_at_least(WEIGHTS)) >= WEIGHTS  # else it would ask for what is not enough
    assert f"need {format_at_least(WEIGHTS)} on" in done.stderr


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"TIERS_NVME": "1GiB", "TIERS_NVME_PATH": "/proc"}, "cannot make a file in /proc"),
        ({"CXX": "/no/such/compiler"}, "CXX names no program: /no/such/compiler; correct or unset it"),
    ],
)
def test_what_cannot_be_set_up_as_configured_ends_the_program_in_one_line(names: dict[str, str], says: str) -> None:
    done = tiered(TRAIN, **names)
    assert done.returncode == 2
    assert done.stdout == ""
    assert says in done.stderr and done.stderr.count("\n") == 1


def test_a_session_says_what_variables_would_have_said(tmp_path: Path) -> None:
    program = "import torch_tiers as tiers\nwith tiers.session(log='info', nvme_path='.', hbm='all'): pass\n"
    done = python(program)
    assert done.returncode == 0
    assert "nvme.paths is set but nvme.capacity is not" in done.stderr


def test_a_session_takes_the_allocator_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiers.toml").write_text('allocator = "torch"')
    assert session()._config.allocator == "torch"
    assert session(allocator="pages")._config.allocator == "pages"


def test_a_policy_that_lacks_its_extra_is_refused_before_training() -> None:
    done = tiered("import sys; sys.modules['scipy'] = None\n" + TRAIN, TIERS_POLICY="autotm")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "tiers: policy autotm needs scipy: pip install scipy\n"


def test_a_run_directory_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = tiered(TRAIN, TIERS_RUN=tmp_path / "file" / "run")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "TIERS_RUN" in done.stderr


def test_tiers_that_are_full_are_told_with_their_names_and_sizes(tmp_path: Path) -> None:
    nvme, run = tmp_path / "nvme", tmp_path / "run"
    nvme.mkdir()
    disk = {"TIERS_DRAM": "2MiB", "TIERS_NVME": "4MiB", "TIERS_NVME_PATH": nvme}
    done = tiered(TRAIN, TIERS_POLICY="move", TIERS_HBM=SMALL, TIERS_RUN=run, **disk)
    assert done.returncode == 0
    assert done.stderr.count("stay in hbm") == 1
    assert f"tier dram and nvme at {nvme} is full: " in done.stderr and "raise TIERS_DRAM or TIERS_NVME" in done.stderr
    assert stats_of(run)["steps"] == 6
    assert list(nvme.iterdir()) == []


@pytest.fixture(scope="module")
def plainly() -> str:
    """What the program prints without tiers."""
    return python(TRAIN).stdout


@pytest.mark.parametrize(
    ("policy", "dram"),
    [("auto", "0"), ("auto", "2MiB"), ("checkpoint", "2MiB"), ("move", "0"), ("move", "4MiB"), ("sentinel", "4MiB")],
)
def test_less_dram_than_a_plan_wants_does_not_end_training(policy: str, dram: str, plainly: str) -> None:
    done = tiered(TRAIN, TIERS_POLICY=policy, TIERS_HBM=SMALL, TIERS_DRAM=dram)
    assert (done.returncode, done.stdout) == (0, plainly), done.stderr
    assert done.stderr.count("tensors that it has no room for stay in hbm") == 1


def test_a_group_that_is_larger_than_all_of_dram_stays_in_hbm() -> None:
    """One tensor of 8 MiB, which no plan can divide."""
    program = TRAIN.replace("torch.randn(2048", "torch.randn(8192")
    plain = python(program)
    done = tiered(program, TIERS_POLICY="move", TIERS_HBM=SMALL, TIERS_DRAM="4MiB")
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr
    assert "8.0 MiB requested, 0 B of 4.0 MiB in use" in done.stderr
