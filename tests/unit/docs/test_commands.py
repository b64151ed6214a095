"""README and the guides say what is true: each block of commands runs, and prints what the page shows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.docs.blocks import blocks, is_shown
from torch_tiers.places import cache_directory

ROOT = Path(__file__).parents[3]
GUIDES = ROOT / "docs/guides"
PAGES = [ROOT / "README.md", *sorted(GUIDES.glob("*.md"))]
LONGEST = 80  # lines of a guide
SECONDS = 90.0  # for the commands of a page


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that has what is compiled at first use, which would take half a minute each, and nothing else."""
    from torch_tiers.migrator.saved import native as saved
    from torch_tiers.migrator.tape import native as tape

    cache = tmp_path_factory.mktemp("cache")
    (cache / "torch-tiers").mkdir(mode=0o700)
    for module in (saved.MODULE, tape.MODULE):
        shutil.copy(module.build(cache_directory()), cache / "torch-tiers")
    return cache


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_run_and_print_what_it_shows(page: Path, built: Path, tmp_path: Path) -> None:
    """In an empty directory that has the repository's programs and its recorded runs."""
    for name in ("examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    own = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(built),
        "HOME": str(tmp_path),
        "COLUMNS": "80",
        "CUDA_VISIBLE_DEVICES": "",
    }
    deadline = time.monotonic() + SECONDS
    for block in blocks(page.read_text()):
        for command, output in block.commands if block.marker is None else ():
            done = subprocess.run(
                ["bash", "-euc", command],
                cwd=tmp_path,
                env={**os.environ, **own},
                capture_output=True,
                text=True,
                timeout=deadline - time.monotonic(),
            )
            where = f"{page.name}, line {block.line}: {command}"
            assert done.returncode == 0, f"{where}\n{done.stderr}"
            assert output is None or is_shown(output, done.stdout + done.stderr), f"{where}\n{done.stdout}{done.stderr}"


def test_a_guide_is_short_and_can_be_found() -> None:
    guides = sorted(GUIDES.glob("*.md"))
    assert {path.name: len(path.read_text().splitlines()) for path in guides if _is_long(path)} == {}
    index = (GUIDES / "README.md").read_text()
    assert [path.name for path in guides if path.name != "README.md" and f"]({path.name})" not in index] == []
    assert "](docs/guides/README.md)" in (ROOT / "README.md").read_text()


def test_the_site_has_every_page() -> None:
    """Its order stands in ``mkdocs.yml``, of which mkdocs itself says nothing where a page is left out."""
    listed = {line.strip().removeprefix("- ") for line in (ROOT / "mkdocs.yml").read_text().splitlines()}
    assert {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} <= listed


def _is_long(path: Path) -> bool:
    return len(path.read_text().splitlines()) > LONGEST


@pytest.mark.parametrize(
    ("page", "why"),
    [
        ("<!-- example -->\n\nText\n", "no block follows"),
        ("Text\n\n<!-- needs a GPU -->\n", "no block follows"),
        ("<!-- needs a GPO -->\n\n    tiers doctor\n", "a comment is one of"),
        ("```\ntiers doctor\n```\n", "indent the block"),
    ],
)
def test_a_marker_stands_before_a_block(page: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        blocks(page)


def test_a_block_is_run_as_a_whole_unless_it_shows_what_it_prints() -> None:
    page = "Text\n\n    a\n\n    b\n\nText\n\n<!-- example -->\n\n    $ c \\\n      d\n    out\n    more\n    $ e\n"
    first, second = blocks(page)
    assert (first.line, first.marker, first.commands) == (3, None, [("a\n\nb", None)])
    assert (second.marker, second.commands) == ("example", [("c \\\n  d", "out\nmore"), ("e", None)])


@pytest.mark.parametrize(
    ("output", "printed", "same"),
    [
        ("a b", "a\n b\n", True),
        ("a ...", "a b c", True),
        ("... c", "a b c", True),
        ("a c", "a b c", False),
        ("a", "a b", False),
        ("a ... b", "a b", True),
        ("1.0", "1x0", False),
    ],
)
def test_what_a_page_shows_may_leave_something_out(output: str, printed: str, same: bool) -> None:
    assert is_shown(output, printed) == same
