"""Installing the package changes nothing for anybody: no name of ours is in the way of a program's own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OWN = ("tiers", "allocator", "migrator")
TRAIN = """
import allocator, migrator, tiers
import torch
print(*(module.WHOSE for module in (tiers, allocator, migrator)))
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.ones(256, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
"""
# What a notebook's kernel does: cells from outside, run one after the other in one namespace, in its folder.
KERNEL = """
import builtins, code, sys
kernel = code.InteractiveInterpreter()
builtins.get_ipython = lambda: kernel
for cell in sys.stdin.read().split("\\n\\n"):
    kernel.runsource(cell, symbol="exec")
"""
WAYS = {
    "a script": [sys.executable, "train.py"],
    "a module": [sys.executable, "-m", "train"],
    "tiers run": [sys.executable, "-m", "torch_tiers", "run", "--allocator", "torch", "--", sys.executable, "train.py"],
    "a notebook": [sys.executable, "-c", KERNEL],
}

installed = pytest.mark.skipif(
    not any(point.value == "torch_tiers.autoload:gate" for point in entry_points(group="torch.backends")),
    reason="the package is not installed, so PyTorch does not know of it",
)


def run(folder: Path, command: list[str], **environ: object) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TIERS_", "PYTHON"))}
    return subprocess.run(
        command,
        cwd=folder,
        env={**inherited, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in environ.items()}},
        input=TRAIN.replace("\n\n", "\n") + "\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def write(folder: Path, of_name: str) -> Path:
    """A program whose modules have the names of our folders, each in the file `of_name`."""
    (folder / "train.py").write_text(TRAIN)
    for name in OWN:
        file = folder / of_name.format(name)
        file.parent.mkdir(exist_ok=True)
        file.write_text("WHOSE = 'own'\n")
    return folder


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program with a tiers.py and so on."""
    return write(tmp_path_factory.mktemp("modules"), "{}.py")


@pytest.fixture(scope="module")
def plainly(modules: Path) -> str:
    """What it prints without tiers."""
    done = run(modules, WAYS["a script"])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("own own own\n")
    return done.stdout


def assert_same_with_tiers(folder: Path, way: str, plainly: str, scratch: Path) -> None:
    done = run(folder, WAYS[way], TIERS_ALLOCATOR="torch", TIERS_RUN=scratch / "run", TIERS_LEDGER=scratch)
    assert (done.returncode, done.stdout) == (0, plainly), done.stderr
    assert (scratch / "run" / "stats.json").exists()  # it was active


@installed
@pytest.mark.parametrize("way", WAYS)
def test_a_program_with_modules_of_our_names_trains_the_same_with_tiers(
    modules: Path, plainly: str, way: str, tmp_path: Path
) -> None:
    assert_same_with_tiers(modules, way, plainly, tmp_path)


@installed
def test_so_does_one_with_packages_of_our_names(plainly: str, tmp_path: Path) -> None:
    assert_same_with_tiers(write(tmp_path, "{}/__init__.py"), "a script", plainly, tmp_path)


def test_the_folder_of_our_source_is_no_package_of_its_own() -> None:
    done = run(ROOT, [sys.executable, "-c", "import tiers"])
    assert done.stderr.endswith(
        "ImportError: import torch_tiers: the folder tiers/ is its source and no package of its own\n"
    )


def test_what_is_installed_is_found_by_one_name() -> None:
    names = "import importlib.util as u; print(*(u.find_spec(n) is not None for n in ('torch_tiers', *{!r})))"
    done = run(Path("/"), [sys.executable, "-c", names.format(OWN)])
    assert done.stdout == "True False False False\n", done.stderr
