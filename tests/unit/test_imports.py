"""No circle of files: whoever reads one reads what it imports first, and comes to an end."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "torch_tiers"


def modules() -> dict[str, Path]:
    """Every module of the package, by name."""
    found = {}
    for folder in (SOURCE, SOURCE / "allocator", SOURCE / "migrator"):
        for path in folder.resolve().rglob("*.py"):
            parts = (
                *folder.relative_to(SOURCE.parent).parts,
                *path.relative_to(folder.resolve()).with_suffix("").parts,
            )
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """What a file imports of the package, for types alone or within a function, too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            inside = (f"{node.module}.{each.name}" for each in node.names)
            yield from (name if name in known else node.module for name in inside)


def test_no_file_imports_itself_by_way_of_others() -> None:
    known = modules()
    assert {"torch_tiers.session", "torch_tiers.allocator.pages", "torch_tiers.migrator.saved.saver"} <= known.keys()
    graph = {name: {other for other in imported(path, known) if other != name} for name, path in known.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None
