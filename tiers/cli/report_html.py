"""``tiers report -o``: the page about a run, and its figures as pictures."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType

from torch_tiers.allocator.errors import TiersError
from torch_tiers.cli.run_files import read_json
from torch_tiers.cli.verb import CliError
from torch_tiers.run_directory import TIMELINE

if TYPE_CHECKING:
    from torch_tiers.planning.html.history import History
    from torch_tiers.planning.html.section import Section


def check(page: Path | None, pictures: Path | None, *, force: bool) -> None:
    """Raise TiersError if the page or the pictures could not be written: asked before anything is drawn."""
    from torch_tiers.planning.html import drawn

    drawn.check()
    try:
        if page is not None and not page.absolute().parent.is_dir():
            raise CliError(f"{page.parent} is not a directory")
        if page is not None and page.is_dir():
            raise CliError(f"{page} is a directory; name a file")
        if page is not None and page.exists() and not force:
            raise CliError(f"{page} exists; --force replaces it")
        if pictures is not None and pictures.exists() and not pictures.is_dir():
            raise CliError(f"{pictures} is not a directory")
    except OSError as error:
        raise CliError(f"{page or pictures} cannot be written: {error.strerror}; name another") from None


def write(
    page: Path | None,
    pictures: Path | None,
    title: str,
    answer: Iterable[str],
    tables: Iterable[RenderableType],
    made: Sequence[Section],
    *,
    force: bool,
) -> list[Path]:
    """Write what is asked for, within `drawn.styled`. Returns the files."""
    from torch_tiers.planning.html import drawn
    from torch_tiers.planning.html.page import page as lines

    files: dict[Path, bytes] = {}
    if page is not None:
        files[page] = "\n".join(lines(title, answer, made, tables)).encode() + b"\n"
    if pictures is not None:
        files |= {pictures / f"{each.name}.png": drawn.png(each.figure) for each in made if each.figure is not None}
    try:
        if pictures is not None:
            pictures.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            if file.exists() and not force:
                raise CliError(f"{file} exists; --force replaces it")
            file.write_bytes(content)
    except OSError as error:
        raise CliError(f"{error.filename} cannot be written: {error.strerror}; name another") from None
    return [*files]


def history_of(directory: Path) -> History | str:
    """The steps of a run, or a sentence that says why they are not known."""
    from torch_tiers.planning.html.history import history_from_json

    if not (directory / TIMELINE).exists():
        return f"The run left no {TIMELINE}, so the times of its steps are not known."
    collects = gc.isenabled()
    gc.disable()  # a million events are a third of the time longer with it, and none of them is garbage
    try:
        return read_json(directory / TIMELINE, history_from_json)
    except TiersError as error:
        return f"The times of the steps are not known: {error}"
    finally:
        if collects:
            gc.enable()
