"""The ways in which a program is run, and what the environment of each holds."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch_tiers.allocator.errors import TiersError
from torch_tiers.allocator.sizes import format_size
from torch_tiers.bench.watch import AROUND, SAVE_ON_CPU

SHARES = (0.7, 0.4, 0.0)  # of a compiled graph's activations that are saved
COMPILED, STATIC_SPLIT = "compiled", "static split"
PEERS = (SAVE_ON_CPU, COMPILED, STATIC_SPLIT)
"""What can be had without a change of the program, beside tiers."""
Kind = Literal["plain", "tiers", "peer", "command"]


@dataclass(frozen=True, slots=True)
class Variant:
    """How the program runs.

    Attributes
    ----------
    name : str
        What the table calls it; no two have the same.
    kind : str
        `plain`: as it is; `tiers`: under tiers; `peer`: with something else around it; `command`: another command.
    policy, budget : str
        Under tiers: a name that `TIERS_POLICY` takes, and what `TIERS_HBM` takes, or a share of plain's memory: 60%.
    allocator : str
        Under tiers: another than the one configured.
    around : str
        What is put around a peer; see `watch`.
    command : tuple of str
        The program in place of the one that is compared; empty for that one.
    """

    name: str
    kind: Kind
    policy: str = ""
    budget: str = ""
    allocator: str = ""
    around: str = ""
    command: tuple[str, ...] = ()

    def environ(self, base: Mapping[str, str], plain: int | None) -> dict[str, str]:
        """Return the environment of its process.

        Parameters
        ----------
        base : mapping
            What programs under tiers have besides.
        plain : int or None
            Bytes of HBM that the plain program takes, as far as that is known.

        Raises
        ------
        TiersError
            If its budget is a share of what nobody knows.
        """
        if self.kind != "tiers":
            others = {name: value for name, value in base.items() if not name.startswith("TIERS_")}
            return others | ({AROUND: self.around} if self.around else {})
        # What it takes to learn the program is a part of each round: no round begins with what one before learned.
        found = {"TIERS_PLAN_CACHE": "0", **base, "TIERS_POLICY": self.policy, "TIERS_HBM": str(self.bytes_of(plain))}
        return found | ({"TIERS_ALLOCATOR": self.allocator} if self.allocator else {})

    def bytes_of(self, plain: int | None) -> str | int:
        """The budget as `TIERS_HBM` takes it; raises TiersError if it is a share of what nobody knows."""
        if not self.budget.endswith("%"):
            return self.budget
        if not plain:
            raise TiersError(
                f"{self.budget} of what? Nothing tells what the plain program takes, as there is no GPU or it does not "
                "fit there: name sizes"
            )
        return int(plain * share(self.budget))

    def why_not(self, *, cuda: bool, compiles: bool | None) -> str | None:
        """Why it cannot be run with this program on this machine, if it cannot; `compiles` is None if nobody knows."""
        if self.allocator == "pages" and not cuda:
            return "needs a GPU"
        if self.around.startswith("compile") and not compiles:
            return "the program compiles nothing" if compiles is False else "the plain program did not get so far"
        return None

    def told_budget(self, plain: int | None) -> str:
        """The budget for people, in bytes where that is known; empty without one."""
        return format_size(int(self.bytes_of(plain))) if self.budget.endswith("%") and plain else self.budget


PLAIN = Variant("plain", "plain")
"""The program as it is: what the others are measured against."""


def share(text: str) -> float:
    """The share that a text such as ``60%`` names; raises TiersError if that is none."""
    try:
        found = float(text.removesuffix("%")) / 100
    except ValueError:
        found = 0.0
    if not 0 < found <= 10:
        raise TiersError(f"{text!r} is no share of what the plain program takes, such as 60% (--hbm)")
    return found


def under_tiers(budgets: Sequence[str], policies: Sequence[str]) -> Iterator[Variant]:
    """Every policy at every budget."""
    for budget in budgets:
        for policy in policies:
            yield Variant(f"tiers {policy} at {budget}", "tiers", policy, budget)


def peers(budgets: Sequence[str], names: Collection[str] = PEERS) -> Iterator[Variant]:
    """Those of `PEERS` that are named."""
    if SAVE_ON_CPU in names:
        yield Variant(SAVE_ON_CPU, "peer", around=SAVE_ON_CPU)
    for part in SHARES if COMPILED in names else ():
        yield Variant(f"{COMPILED}, saves {part:.0%}", "peer", around=f"compile:{part:g}")
    for budget in budgets if STATIC_SPLIT in names else ():
        # What an allocator of virtual memory does by itself: what comes first has HBM, what does not fit has DRAM.
        yield Variant(f"{STATIC_SPLIT} at {budget}", "tiers", "keep", budget, "pages")


def given(text: str) -> Variant:
    """The variant that ``NAME=COMMAND`` describes; raises TiersError if it does not."""
    name, equals, words = text.partition("=")
    try:
        command = tuple(shlex.split(words))
    except ValueError as error:
        raise TiersError(f"--variant {text!r}: {error}") from None
    if not name.strip() or not equals or not command:
        raise TiersError(
            f"--variant {text!r} is not NAME=COMMAND, such as 'own checkpointing=python train.py --checkpoint'"
        )
    return Variant(name.strip(), "command", command=command)
