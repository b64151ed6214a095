"""Hooks of mkdocs: README is the first page, and links to what the site does not have become plain paths."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import normpath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add README as ``index.md``."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
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
        if not path.startswith("docs/"):
            return f"{text} (`{path}`)" if path not in text else text
        up = "../" * page.file.src_uri.count("/")
        return f"[{text}]({up}{path.removeprefix('docs/')}{'#' * bool(heading)}{heading})"

    return LINK.sub(linked, markdown)
