"""The gate: free when off, silent when on, and it never breaks `import torch`."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "XDG_CONFIG_HOME": "/nonexistent", **environ},
        capture_output=True,
        text=True,
        check=False,
    )


# A session that only tells that it was installed, in the place of the real one.
FAKE = """
import sys, types
session = types.ModuleType('torch_tiers.session')
session.install = lambda config: print('installed', config.allocator, config.hbm.capacity)
sys.modules['torch_tiers.session'] = session
"""
GATE = "from torch_tiers.autoload import gate; gate()"


@pytest.mark.parametrize("environ", [{}, {"TIERS_ALLOCATOR": ""}, {"TIERS_ALLOCATOR": "off", "TIERS_HBM": "lots"}])
def test_off_imports_nothing(environ):
    code = f"""
import sys
before = set(sys.modules)
{GATE}
new = set(sys.modules) - before
print(sorted(name for name in new if name.partition('.')[0] not in sys.stdlib_module_names), 'logging' in new)
"""
    assert python(code, **environ).stdout == "['torch_tiers', 'torch_tiers.autoload'] False\n"


def test_a_misspelt_allocator_does_not_pass_for_tiers():
    done = python(GATE, TIERS_ALLOCATR="torch", TIERS_HBM="1GiB")
    assert "TIERS_ALLOCATR is no variable of ours; did you mean TIERS_ALLOCATOR?" in done.stderr
    assert (done.stdout, done.stderr.count("\n"), done.returncode) == ("", 1, 0)


@pytest.mark.parametrize("name", ["TIERS_HBM", "TIERS_POLICY", "TIERS_RUN"])
def test_what_has_no_effect_without_an_allocator_is_told_at_the_start(name):
    done = python(GATE + "; import sys; print('trains', file=sys.stderr)", **{name: "1GiB"}, TIERS_LOG="info")
    said, trains = done.stderr.splitlines()
    assert said.startswith(f"tiers is off: {name} is set, and TIERS_ALLOCATOR is not: only a tiers.session in code")
    assert trains == "trains"


def test_variables_that_change_nothing_alone_are_nobody_s_mistake():
    assert python(GATE, TIERS_LOG="info", TIERS_CONFIG="tiers.toml").stderr == ""


def test_variables_that_a_session_is_about_to_read_are_nobody_s_mistake():
    assert python("import sys; sys.modules['torch_tiers.session'] = sys; " + GATE, TIERS_HBM="1GiB").stderr == ""


def test_that_tiers_is_off_is_not_told_again_by_what_a_program_starts():
    code = f"import subprocess, sys; {GATE}; subprocess.run([sys.executable, '-c', {GATE!r}])"
    assert python(code, TIERS_HBM="1GiB").stderr.count("tiers is off") == 1


def test_on_installs_the_session_with_the_configuration():
    done = python(FAKE + GATE, TIERS_ALLOCATOR="torch", TIERS_HBM="4096")
    assert (done.stdout, done.stderr, done.returncode) == ("installed torch 4096\n", "", 0)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"TIERS_ALLOCATOR": "on"}, "allocator = 'on'"),
        ({"TIERS_ALLOCATOR": "torch", "TIERS_HBM": "lots"}, "hbm.capacity = 'lots'"),
        ({"TIERS_ALLOCATOR": "torch", "TIERS_HMB": "1"}, "did you mean TIERS_HBM?"),
    ],
)
def test_a_wrong_configuration_is_one_line_and_exit_code_2(environ, message):
    done = python(FAKE + GATE + "; print('training')", **environ)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "typed",
    ["import builtins; builtins.get_ipython = None\n", "import sys; sys.ps1 = '>>> '\n"],
    ids=["notebook", "prompt"],
)
def test_where_somebody_types_a_wrong_configuration_is_an_exception(typed):
    """Ending the process would end all that they have in it."""
    code = f"{FAKE}{typed}try:\n    {GATE}\nexcept Exception as error:\n    print(type(error).__name__, error)"
    done = python(code, TIERS_ALLOCATOR="torch", TIERS_HBM="lots")
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.startswith("ConfigError hbm.capacity = 'lots' (environment TIERS_HBM) is not accepted")
    assert done.stdout.endswith("; then restart the kernel, or Python\n")  # torch cannot be imported a second time


def test_a_configuration_that_the_session_refuses_ends_alike():
    refused = FAKE + "from torch_tiers.config import ConfigError\ndef refuse(config): raise ConfigError('used')\n"
    done = python(f"{refused}session.install = refuse\n{GATE}; print('training')", TIERS_ALLOCATOR="torch")
    assert (done.stdout, done.stderr, done.returncode) == ("", "tiers: used\n", 2)


@pytest.mark.parametrize("error", ["OSError('closed')", "RuntimeError('no home')"])
def test_a_configuration_that_cannot_be_read_is_no_failure_of_ours(error):
    """With which the program would go on, without its budget."""
    broken = f"import torch_tiers.config\ndef load(): raise {error}\ntorch_tiers.config.load = load\n"
    done = python(f"{FAKE}{broken}{GATE}; print('training')", TIERS_ALLOCATOR="torch")
    assert (done.stdout, done.returncode) == ("", 2)
    assert done.stderr.startswith("tiers: the configuration cannot be read: ") and done.stderr.count("\n") == 1


def test_a_user_config_that_cannot_be_read_is_said_once_and_the_program_runs_with_its_budget():
    done = python(FAKE + GATE, TIERS_ALLOCATOR="torch", TIERS_HBM="4096", XDG_CONFIG_HOME="/" + "x" * 300)
    assert (done.stdout, done.returncode) == ("installed torch 4096\n", 0)
    assert done.stderr.count("\n") == done.stderr.count("counts as absent") == 1


def test_a_failure_of_ours_is_one_line_and_the_program_goes_on():
    broken = FAKE + "def fail(config): raise OSError('no luck')\nsession.install = fail\n"
    done = python(broken + GATE + "; print('training')", TIERS_ALLOCATOR="torch")
    assert done.returncode == 0
    assert done.stdout == "training\n"
    assert done.stderr == "tiers: tiers is not active, the program runs without it: OSError: no luck\n"


@pytest.mark.parametrize("where", ["environment", "file"])
def test_a_failure_of_ours_ends_a_program_that_was_to_have_a_budget(where, tmp_path):
    (tmp_path / "some.toml").write_text("[hbm]\ncapacity = '4096'")
    broken = FAKE + "def fail(config): raise OSError('no luck')\nsession.install = fail\n"
    budget = {"TIERS_HBM": "4096"} if where == "environment" else {"TIERS_CONFIG": str(tmp_path / "some.toml")}
    done = python(broken + GATE + "; print('training')", TIERS_ALLOCATOR="torch", **budget)
    assert (done.stdout, done.returncode, done.stderr.count("\n")) == ("", 2, 1)
    origin = "environment TIERS_HBM" if where == "environment" else f"{tmp_path}/some.toml"
    assert f"keeps the program within hbm.capacity ({origin}): OSError: no luck; unset TIERS_ALLOCATOR" in done.stderr


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs at /dev/shm")
def test_a_warning_is_said_by_the_program_and_not_again_by_its_workers():
    code = f"""
import multiprocessing
{FAKE}
def work():
    {GATE}
{GATE}
worker = multiprocessing.get_context('fork').Process(target=work)
worker.start()
worker.join()
"""
    environ = {"TIERS_ALLOCATOR": "torch", "TIERS_NVME": "1MiB", "TIERS_NVME_PATH": "/dev/shm"}
    done = python(code, **environ)
    assert done.stderr.count("is on tmpfs") == 1


def test_processes_that_start_in_another_directory_find_the_same_files(tmp_path):
    """A DataLoader's worker, after Hydra had changed the directory, ended with code 2."""
    (tmp_path / "my.toml").write_text("")
    (tmp_path / "nv").mkdir()
    code = f"import os; os.chdir({str(tmp_path)!r})\n{FAKE}{GATE}\nprint(*(os.environ[n] for n in ('TIERS_CONFIG',"
    code += " 'TIERS_RUN', 'TIERS_NVME_PATH')))"
    environ = {"TIERS_CONFIG": "my.toml", "TIERS_RUN": "out", "TIERS_NVME": "1GiB", "TIERS_NVME_PATH": "nv"}
    done = python(code, TIERS_ALLOCATOR="torch", PYTHONPATH=str(ROOT), **environ)
    assert done.stdout.split()[-3:] == [str(tmp_path / name) for name in ("my.toml", "out", "nv")]


def test_our_lines_go_through_the_logging_of_a_program_that_has_some():
    code = f"import logging; logging.basicConfig(format='own %(message)s')\n{FAKE}{GATE}\n"
    code += "logging.getLogger('tiers').warning('hello')"
    assert python(code, TIERS_ALLOCATOR="torch").stderr == "own hello\n"


def test_session_stays_the_class_after_its_module_is_imported():
    code = "import torch_tiers.session; print(isinstance(torch_tiers.session, type), callable(torch_tiers.session))"
    assert python(code).stdout == "True True\n"


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    assert (
        "AttributeError: module 'torch_tiers' has no attribute 'sesion'"
        in python("import torch_tiers; torch_tiers.sesion").stderr
    )


@pytest.mark.skipif(
    not any(point.value == "torch_tiers.autoload:gate" for point in entry_points(group="torch.backends")),
    reason="the package is not installed, so PyTorch does not know of it",
)
def test_the_gate_is_not_missed_where_our_session_is_what_imports_torch() -> None:
    code = (
        "import torch_tiers; torch_tiers.session\n"
        "from torch_tiers.migrator.runtime import entry\n"
        "print(entry._active is not None)"
    )
    done = python(code, TIERS_ALLOCATOR="torch", TIERS_HBM="64MiB")
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.skipif(
    not any(point.value == "torch_tiers.autoload:gate" for point in entry_points(group="torch.backends")),
    reason="the package is not installed, so PyTorch does not know of it",
)
def test_a_part_of_ours_that_imports_torch_first_is_named() -> None:
    """What the session needs is half-made then; who compares policies in code may do so."""
    budget = {"TIERS_ALLOCATOR": "torch", "TIERS_HBM": "64MiB"}
    done = python("import torch_tiers.migrator.streams", **budget)
    assert done.returncode == 2
    assert "; import torch before torch_tiers.migrator.streams; " in done.stderr
    assert python("import torch, torch_tiers.migrator.streams", **budget).stderr == ""


@pytest.mark.skipif(
    not any(point.value == "torch_tiers.autoload:gate" for point in entry_points(group="torch.backends")),
    reason="the package is not installed, so PyTorch does not know of it",
)
def test_in_a_notebook_the_failure_of_import_torch_says_what_is_wrong() -> None:
    code = "import builtins; builtins.get_ipython = None\nimport torch"
    done = python(code, TIERS_ALLOCATOR="torch", TIERS_HBM="64MiB", TIERS_RUN="/proc/nowhere")
    assert "ConfigError: TIERS_RUN: /proc/nowhere cannot be written: " in done.stderr
