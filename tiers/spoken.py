"""What a session says of itself to who looks on: one line as training begins, and what the run came to at its end."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torch_tiers.allocator.sizes import Share, format_size
from torch_tiers.config import Config
from torch_tiers.launcher import is_started_beside_others, rank
from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.runtime.runtime import Runtime
from torch_tiers.refusals import is_new

log = logging.getLogger("tiers")

NEWEST_TESTED = (2, 13)  # torch


class Spoken:
    """Says a line at the beginning and one at the end on a terminal, and more with ``TIERS_LOG=info``."""

    def __init__(self) -> None:
        self._begun = False

    def begins(self, what: str) -> None:
        """Tell once that training begins with tiers, and with `what`. Called in each thread that trains."""
        if not self._begun:
            if _is_heard():
                # For `ends`. Imported at exit they call exec(), as named tuples do. CPython then forgets that a
                # KeyboardInterrupt ended the program, which exits with 1 instead of dying of SIGINT.
                from torch_tiers.planning import answer, corrections, why  # noqa: F401
            self._begun = True
            say(f"at work: {what}")

    def ends(self, runtime: Runtime, links: Links, stats: dict[str, Any], run: Path | None, *, written: bool) -> None:
        """Tell what the run came to; `run` is the directory that was asked for, and `written` whether it is there."""
        if runtime.models.any_ran and not runtime.armed:
            # Workers that preprocess with modules, and ranks but the first, have nothing to add.
            if rank() == 0 and not is_started_beside_others():
                # A report was asked for and there is none, which must not go unsaid.
                (log.warning if run is not None else say)(_inferred(stats))
            return
        if runtime.learned is None or not _is_heard():
            return
        from torch_tiers.planning import answer, corrections, why  # not before: tables take a while to import

        trace, plan, _ = runtime.learned
        links = corrections.corrected(links, stats)
        account = why.why(trace, plan, links, stats)
        answered = answer.answer_of(trace, links, stats, account)
        if not log.isEnabledFor(logging.INFO):
            say(f"{answer.in_short(answered)}; {_more(run, written=written)}")
            return
        for line in answer.render(answered, account.hints):
            log.info("%s", line)
        log.info("%s", _more(run, written=written))


def describe(config: Config) -> str:
    """What was asked for, in a few words."""
    sizes = {"hbm": config.hbm.capacity, "dram": config.dram.capacity, "nvme": config.nvme.capacity}
    said = [f"{tier} {n if isinstance(n, Share) else format_size(n)}" for tier, n in sizes.items() if n is not None]
    return ", ".join([f"allocator {config.allocator}", f"policy {config.policy}", *said])


def say_if_untested() -> None:
    """Tell, once, where torch is newer than what was tested: we use some of its insides."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    newest = ".".join(map(str, NEWEST_TESTED))
    text = f"torch {torch.__version__} is newer than {newest}, the newest that torch-tiers was tested with"
    if found is not None and tuple(map(int, found.groups())) > NEWEST_TESTED and is_new(text):
        log.warning(text)


def _more(run: Path | None, *, written: bool) -> str:
    if written:
        return f"details: tiers report {run}; other budgets: tiers suggest {run}"
    return "details: run with TIERS_RUN=DIR, then tiers report DIR and tiers suggest DIR"


def _inferred(stats: Mapping[str, Any]) -> str:
    text = (
        "no training step was made, so nothing was planned and there is no report: only what is saved for backward "
        "is offloaded"
    )
    if stats["allocator"] != "pages":
        return f"{text}; only TIERS_ALLOCATOR=pages keeps weights within TIERS_HBM"
    lay = f": {format_size(stats['demoted'])} lay in dram at the end" if stats["demoted"] else ""
    return f"{text}; weights that exceed TIERS_HBM are streamed{lay}"


def _is_heard() -> bool:
    """Whether somebody asked for what is to be known, or looks on; of several ranks the first alone speaks unasked."""
    if log.isEnabledFor(logging.INFO):
        return True
    return log.isEnabledFor(logging.WARNING) and rank() == 0 and sys.stderr is not None and sys.stderr.isatty()


def say(text: str) -> None:
    """Log a line with ``TIERS_LOG=info``; else show it only if stderr is a terminal, on the first rank."""
    if _is_heard():
        # Past the logger's own level: it is no warning, and on a terminal it is said all the same.
        log.handle(log.makeRecord(log.name, logging.INFO, __file__, 0, "%s", (text,), None))
