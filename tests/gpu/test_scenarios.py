"""The scenarios of tests/scenarios on a GPU; a family has a process of its own, so that none spoils another's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.scenarios import FAMILIES, ON_GPU

ROOT = Path(__file__).parents[2]


def on_gpu(module: str, *arguments: str) -> None:
    """Run a module of tests/scenarios; show what it said if it does not hold."""
    command = [sys.executable, "-m", f"tests.scenarios.{module}", *arguments, "--device", "cuda"]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout.splitlines()[-1]


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", FAMILIES)
def test_holds(family: str) -> None:
    on_gpu(family)


# `processes` makes processes that are not told to use our allocator.
@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", [family for family in (*ON_GPU, *FAMILIES) if family != "processes"])
def test_holds_on_our_pages(family: str) -> None:
    on_gpu(family, "--allocator", "pages")
