"""Runs every variant once a round, in an order that turns; goes on where an earlier command stopped."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch_tiers.allocator.errors import TiersError
from torch_tiers.bench.program import Outcome, run
from torch_tiers.bench.variants import PLAIN, Variant

OUTCOME = "outcome.json"
ABOUT = "bench.json"


class PlainFails(TiersError):
    """The program as it is does not run, though there was memory enough."""


@dataclass
class Rounds:
    """The runs of one bench.

    Attributes
    ----------
    command
        The program.
    variants
        All there are; the first is `PLAIN`.
    directory
        Has a directory for each run, by round and variant.
    environ
        What programs under tiers find in their environment besides their variant's.
    pattern
        Finds the losses in what programs print.
    seconds
        After which a run is interrupted.
    retry
        Whether what failed in an earlier command is run again.
    say
        Is told what runs now.
    """

    command: Sequence[str]
    variants: Sequence[Variant]
    directory: Path
    environ: Mapping[str, str]
    pattern: str
    seconds: float | None = None
    retry: bool = False
    say: Callable[[str], object] = lambda line: None
    outcomes: dict[Variant, list[Outcome]] = field(default_factory=dict)

    @property
    def plain(self) -> Outcome:
        """The first run of the program as it is."""
        return self.outcomes[PLAIN][0]

    def all(self, count: int) -> None:
        """Run `count` rounds; a variant that failed is left out of those that follow.

        Where the program as it is does not fit into the GPU, the others are compared with each other.

        Raises
        ------
        PlainFails
            If the program as it is fails in another way.
        OSError
            If a program cannot be started.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        commands = {variant.name: list(variant.command or self.command) for variant in self.variants}
        _claim(self.directory / ABOUT, commands)
        for number in range(count):
            # Whoever runs first finds the card cooler: each is first in turn, but the plain program has to be known.
            first = number % len(self.variants)
            for variant in [*self.variants[first:], *self.variants[:first]]:
                before = self.outcomes.setdefault(variant, [])
                if before and before[-1].reason:
                    continue
                self.say(f"round {number + 1} of {count}: {variant.name}")
                before.append(self._one(variant, number))
                if variant == PLAIN and before[-1].reason and not before[-1].does_not_fit:
                    raise PlainFails(f"the program as it is {before[-1].reason}")

    def _one(self, variant: Variant, number: int) -> Outcome:
        directory = self._of(variant, number)
        kept = directory / OUTCOME
        if kept.exists():
            found = Outcome(**json.loads(kept.read_text()))
            again = self.retry or (variant == PLAIN and not found.does_not_fit)
            if not found.reason or not again:
                return found
        why_not = None
        if variant != PLAIN:
            too_large = self.plain.does_not_fit
            compiles = None if too_large else self.plain.compiles
            why_not = variant.why_not(cuda=self.plain.cuda or too_large, compiles=compiles)
        if why_not is not None:
            return Outcome(why_not, tried=False)
        if directory.exists():
            shutil.rmtree(directory)  # of a run that did not end
        environ = variant.environ(self.environ, None if variant == PLAIN else self.plain.memory)
        outcome = run(variant.command or self.command, environ, directory, self.pattern, self.seconds)
        part = kept.with_suffix(".part")
        part.write_text(json.dumps(outcome.to_json(), indent=2) + "\n")
        os.replace(part, kept)  # last, and as a whole: a run that has it is over
        return outcome

    def _of(self, variant: Variant, number: int) -> Path:
        return self.directory / f"{number}-{re.sub(r'[^A-Za-z0-9.%]+', '-', variant.name)}"


def _claim(about: Path, commands: Mapping[str, list[str]]) -> None:
    """Have the directory be that of these commands by variant, for now and for when it goes on.

    Raises
    ------
    TiersError
        If it is another's.
    """
    known: dict[str, list[str]] = {}
    if about.exists():
        known = json.loads(about.read_text())
        if another := [name for name, words in commands.items() if known.get(name, words) != words]:
            raise TiersError(f"--out {about.parent} holds runs of another {another[0]}: name another directory")
    elif any(about.parent.iterdir()):
        raise TiersError(f"--out {about.parent} holds something else: name another directory")
    about.write_text(json.dumps(known | dict(commands), indent=2) + "\n")
