"""What there is to measure: methods by name, cells in order, and what code a cell is measured with. Needs no torch."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch_tiers.migrator.policies import POLICIES

ROOT = Path(__file__).resolve().parents[2]
WORKLOADS = ("reference_gpt", "long_context_gpt", "resnet152")
ACTIVATION_BUDGETS = ("0.7", "0.4", "0.2", "0")
COMPILED = {"compile": "blocks", "compile-whole": "whole"}
ALLOCATORS = {"tiers": "torch", "pages": "pages"}
PROGRAM = ("benchmarks/workloads.py", "examples/train_gpt.py", "examples/train_resnet.py")
RUNTIME = ("tiers", "allocator", "migrator")
SOURCES = {".py", ".cpp", ".h"}
BUILT = "CMakeFiles"  # what an editable install leaves in the tree


@dataclass(frozen=True, slots=True)
class Method:
    """A way to train in less HBM.

    Attributes
    ----------
    name
        As on the command line.
    kind
        ``ideal``, ``tiers``, ``checkpoint``, ``checkpoint-k``, ``save_on_cpu`` or ``trl``.
    policy, allocator
        Of ``tiers``; the allocator is ``torch`` or ``pages``.
    compiled
        What is compiled: nothing, ``blocks`` (each on its own) or ``whole`` (forward and loss in one).
    activation_budget
        Of ``torch.compile``, from 0 to 1.
    """

    name: str
    kind: str
    policy: str = ""
    allocator: str = "torch"
    compiled: str = ""
    activation_budget: float = 1.0

    @property
    def budgeted(self) -> bool:
        """Whether what it does depends on the budget."""
        return self.kind in ("tiers", "checkpoint-k")

    @property
    def ours(self) -> bool:
        """Whether it is measured with the code of the runtime."""
        return self.kind == "tiers"

    def obstacle(self, *, cuda: bool, trl: bool) -> str | None:
        """Why it cannot be measured here, if it cannot."""
        if self.kind == "trl" and not trl:
            return "not given: name the file that has OffloadActivations with --trl"
        if not cuda and (self.kind in ("save_on_cpu", "trl") or self.allocator == "pages"):
            return "needs a GPU"
        return None


def parse(name: str) -> Method:
    """The method of that name.

    Raises
    ------
    ValueError
        If there is none.
    """
    if name in ("ideal", "checkpoint", "checkpoint-k", "save_on_cpu", "trl"):
        return Method(name, name)
    with suppress(ValueError):  # of a share that is none
        if (method := _compiled(name) or _tiers(name, name)) is not None:
            return method
    raise ValueError(
        f"there is no method {name}. Methods: ideal, checkpoint, checkpoint-k, save_on_cpu, trl, compile-budget, "
        "ideal+compile, compile:0.4, tiers:POLICY, pages:POLICY, these two also with +compile or +compile:0.4; with "
        f"compile-whole for compile, forward and loss are compiled in one. Policies: {', '.join(POLICIES)}"
    )


def _tiers(name: str, base: str, **compiled: Any) -> Method | None:
    head, _, policy = base.partition(":")
    known = policy in POLICIES and head in ALLOCATORS
    return Method(name, "tiers", policy, ALLOCATORS[head], **compiled) if known else None


def _compiled(name: str) -> Method | None:
    """The compiled program with a share of its activations (``compile:0.4``), or what runs around it."""
    base, plus, around = name.rpartition("+")  # policies have a plus in their names, too
    how, colon, text = around.partition(":")
    if how not in COMPILED:
        return None
    share = float(text) if colon else 1.0
    if not 0 <= share <= 1:
        raise ValueError
    if (plus, colon) == ("", ":") or (base, colon) == ("ideal", ""):
        return Method(name, "ideal", compiled=COMPILED[how], activation_budget=share)
    return _tiers(name, base, compiled=COMPILED[how], activation_budget=share)


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing to measure; `budget` is in percent of the plain program's peak reserved memory, None for any."""

    workload: str
    budget: int | None
    method: Method


def cells(workloads: Iterable[str], budgets: Iterable[int], methods: Iterable[str]) -> Iterator[Cell]:
    """All cells, each once, in the order given: by workload, then by method, then by budget."""
    chosen = [parse(one) for name in methods for one in _members(name)]
    budgets = list(budgets)
    seen = set()
    for workload in workloads:
        for method in chosen:
            for budget in budgets if method.budgeted else [None]:
                cell = Cell(workload, budget, method)
                if cell not in seen:
                    seen.add(cell)
                    yield cell


def _members(name: str) -> list[str]:
    """``compile-budget`` is several measurements, of which the table takes the fastest that fits."""
    head = name.removesuffix("-budget")
    if head == name or head not in COMPILED:
        return [name]
    return [f"ideal+{head}", *(f"{head}:{part}" for part in ACTIVATION_BUDGETS)]


@cache
def code(*, ours: bool, root: Path = ROOT) -> str:
    """What identifies the code of a measurement: a hash, as there need not be a checkout.

    Parameters
    ----------
    ours
        With the runtime; what peers do depends on the program alone.
    """
    files = [root / name for name in PROGRAM]
    if ours:
        found = (path for name in RUNTIME for path in (root / name).rglob("*") if BUILT not in path.parts)
        files += [path for path in found if path.suffix in SOURCES or path.name == "CMakeLists.txt"]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def commit(root: Path = ROOT) -> str | None:
    """The commit that is checked out, marked where files differ from it; None without a checkout."""
    try:
        words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
        answer = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None


def machine() -> str:
    """The name of the first GPU, or ``cpu``."""
    try:
        words = ["nvidia-smi", "--id=0", "--query-gpu=name", "--format=csv,noheader"]
        answer = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError:
        return "cpu"
    return answer.stdout.strip() if answer.returncode == 0 and answer.stdout.strip() else "cpu"
