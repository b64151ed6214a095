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


def test_variables_for_a_session_in_code_are_nobody_s_mistake():
    later = "; import sys; sys.modules['torch_tiers.session'] = sys"
    assert python(GATE + later, TIERS_HBM="1GiB", TIERS_CONFIG="tiers.toml").stderr == ""


def test_a_budget_that_nobody_read_is_told_at_the_end():
    done = python(GATE + "; print('trains')", TIERS_HBM="1GiB", TIERS_LOG="info")
    assert done.stderr == "tiers was off: TIERS_HBM is set, and TIERS_ALLOCATOR is not\n"
    assert python(GATE, TIERS_LOG="info").stderr == ""


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
    done = python("import torch_tiers.migrator.lanes", TIERS_ALLOCATOR="torch", TIERS_HBM="64MiB")
    assert done.stderr.endswith("; import torch before torch_tiers.migrator.lanes\n")
    assert python("import torch, torch_tiers.migrator.lanes", TIERS_ALLOCATOR="torch", TIERS_HBM="64MiB").stderr == ""
