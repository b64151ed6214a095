"""What our code can say to a user: the texts of its warnings and of the errors that it raises, with ... for values."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = ("tiers", "allocator", "migrator")
ERRORS = ROOT / "allocator/errors.py"
TELL = {"warning", "error", "_say_once", "_warn_once"}
"""Methods whose first text the user sees."""
WITHIN = {"BadField", "Differs", "Untrue", "Waived", "CoreError", "CoreFull", "CoreBusy"}
"""Errors of ours that are only ever the reason in another message."""
BY_FACTS = {"TierFull", "TierTooSmall", "StoreError", "CorruptionError", "NoPlanFits"}
"""Errors of ours that make their text of what they are given: in `__str__`, or as they are made."""
ALSO = {"RuntimeError", "DriverError", "ArgumentTypeError"}
"""Errors that are not of ours by class, but of which the user sees the text if it is advice."""
_PLACE = re.compile(r"%[-#0-9.]*[sdxrgf]")


@dataclass
class Said:
    """Texts by the place that has them, and the places whose text is not written there."""

    texts: dict[str, str] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) if not _is_linked(path)]


def everything() -> list[str]:
    """All texts in the sources, whatever they are for."""
    found = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            found += texts(node)
    for path in (ROOT / "allocator/native").rglob("*.cpp"):
        found += [re.sub(r'"[^"]*\+[^"]*"', "...", path.read_text())]
    return found


def said() -> Said:
    """What can be said, found in the syntax: arguments of `log.warning`, of exceptions that are raised, and so on."""
    trees = {path: ast.parse(path.read_text()) for path in sources()}
    ours = _errors(list(trees.values()))
    result = Said()
    for path, tree in trees.items():
        for function in _functions(tree):
            names = _named(function)
            if function.name == "__str__" and path == ERRORS:
                for node in _own(function):
                    if isinstance(node, ast.Return) and node.value is not None:
                        result.texts |= _placed(path, node, texts(node.value))
            for node in _own(function):
                argument = _argument(node, ours)
                if argument is None:
                    continue
                found = texts(argument)
                if isinstance(argument, ast.Name):
                    found = names.get(argument.id, [])
                known = _placed(path, node, found)
                result.texts |= known
                if not known:
                    result.unknown.add(f"{path.relative_to(ROOT)}: {ast.unparse(argument)}")
    return result


def texts(node: ast.AST) -> list[str]:
    """The texts that an expression may have; none if it is none of texts."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [_PLACE.sub("...", node.value)]
    if isinstance(node, ast.JoinedStr):
        return ["".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)]
    if isinstance(node, ast.IfExp):
        return texts(node.body) + texts(node.orelse)
    return []


def matches(message: str, text: str) -> bool:
    """Whether a text has a message in it, of which ... at its ends may stand for anything, and within for a value."""
    return _one_value(message).strip(" .") in _one_value(text)


def _one_value(text: str) -> str:
    return re.sub(r"\.{3,}( \.{3,})*", "...", text)


def _placed(path: Path, node: ast.stmt | ast.expr, found: list[str]) -> dict[str, str]:
    place = f"{path.relative_to(ROOT)}:{node.lineno}"
    return {f"{place} {i}": text for i, text in enumerate(found) if re.search("[a-z]{3}", text)}


def _argument(node: ast.stmt | ast.expr, ours: set[str]) -> ast.expr | None:
    """The text that a node says."""
    call: ast.AST | None = node
    if isinstance(node, ast.Raise):
        call = node.exc
        if isinstance(call, ast.Call) and _name(call.func) in ours and call.args:
            return call.args[0]
        return None
    if not isinstance(call, ast.Call) or not call.args or not isinstance(call.func, ast.Attribute):
        return None
    if call.func.attr == "append" and ast.unparse(call.func.value).rpartition(".")[2] in ("to_say", "warnings"):
        return call.args[0]
    if ast.unparse(call.func) == "super().__init__" and isinstance(call.args[0], ast.JoinedStr):
        return call.args[0]
    if call.func.attr == "_warn_once" and len(call.args) > 1:
        return call.args[1]
    return call.args[0] if call.func.attr in TELL else None


def _errors(trees: list[ast.Module]) -> set[str]:
    """Our errors' names."""
    bases = {
        node.name: {_name(base) for base in node.bases}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"TiersError"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found - WITHIN - BY_FACTS | ALSO


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _own(function: ast.AST) -> Iterator[ast.stmt | ast.expr]:
    """Statements and expressions of a function, without those of functions in it."""
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.stmt | ast.expr):
            yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += ast.iter_child_nodes(node)


def _named(function: ast.AST) -> dict[str, list[str]]:
    """Texts by the name that they have in a function."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).extend(texts(node.value))
    return found


def _name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def _is_linked(path: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents)
