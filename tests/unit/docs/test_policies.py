"""The guide to the policies has each, with the paper that its file names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from torch_tiers.migrator.policies import MODULES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/guides/policies.md").read_text()


@pytest.mark.parametrize("name", MODULES)
def test_each_policy_has_its_paragraph_and_its_paper(name: str) -> None:
    file = f"migrator/policies/{MODULES[name].partition(':')[0]}.py"
    named = re.compile(rf"\*\*(\[{re.escape(name)}\]\(../../{re.escape(file)}\)|{re.escape(name)})\*\*")
    (paragraph,) = (text for text in PAGE.split("\n\n") if named.search(text))
    assert f"](../../{file})" in paragraph, "its page on the site, and its file elsewhere"
    path = ROOT / file
    source = ast.get_docstring(ast.parse(path.read_text())) or ""
    papers = re.findall(r"\((\w+ et al\., [^,):]+)", source)
    assert [paper for paper in papers if paper not in paragraph.replace("\n", " ")] == []
    assert bool(papers) == ("et al." in paragraph) == (name not in ("auto", "keep", "move"))
