"""Hooks of mkdocs: README is the first page, each policy has one, and links lead to pages or become paths."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from posixpath import normpath
from typing import Any

from mkdocs.structure.files import File

from torch_tiers.migrator.policies import MODULES

ROOT = Path(__file__).parents[1]
POLICIES = "migrator/policies"
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Add the policies to the navigation."""
    config.nav.append({"Policies": [f"policies/{name}.md" for name in _files()]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add README as ``index.md``, and a page for each policy."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
    for name in _files():
        files.append(File.generated(config, f"policies/{name}.md", content=_policy(name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Have links lead to pages of the site, and name the file where there is none."""
    here = "" if page.file.src_uri == "index.md" else f"docs/{page.file.src_uri}".rpartition("/")[0]

    def linked(found: re.Match[str]) -> str:
        text, target = found.groups()
        path, _, heading = target.partition("#")
        if not path or ":" in path:
            return found[0]
        path = normpath(f"{here}/{path}" if here else path)
        up = "../" * page.file.src_uri.count("/")
        if path.startswith(f"{POLICIES}/"):
            return f"[{text}]({up}policies/{Path(path).stem}.md)"
        if not path.startswith("docs/"):
            return f"{text} (`{path}`)" if path not in text else text
        return f"[{text}]({up}{path.removeprefix('docs/')}{'#' * bool(heading)}{heading})"

    return LINK.sub(linked, markdown)


def _files() -> list[str]:
    """The files of the policies, without their suffix."""
    return sorted({where.partition(":")[0] for where in MODULES.values()})


def _policy(file: str) -> str:
    """The page of a policy: its names, and what its file says of its paper and of what is left out of that."""
    names = [name for name, where in MODULES.items() if where.partition(":")[0] == file]
    said = ast.get_docstring(ast.parse((ROOT / POLICIES / f"{file}.py").read_text())) or ""
    said = re.sub(r"::$", ":", said, flags=re.MULTILINE).replace("``", "`")
    return (
        f"# {', '.join(names)}\n\n{said}\n\nIts file is `{POLICIES}/{file}.py`; `TIERS_POLICY={names[0]}` chooses it.\n"
    )
