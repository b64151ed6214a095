"""A file does one thing, and fits on a few screens."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST = {".py": 350, ".h": 450, ".cpp": 450}  # lines


def test_a_source_file_fits_on_a_few_screens() -> None:
    files = [path for folder in ("tiers", "allocator", "migrator") for path in (ROOT / folder).rglob("*")]
    sizes = {
        path: len(path.read_text().splitlines())
        for path in files
        if path.suffix in MOST and "CMakeFiles" not in path.parts
    }
    assert len(sizes) > 200
    assert [str(path.relative_to(ROOT)) for path, size in sizes.items() if size > MOST[path.suffix]] == []
