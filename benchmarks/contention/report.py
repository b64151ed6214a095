"""What the cells of `benchmarks.contention` come to: the table, and whether what is promised holds. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from torch_tiers.allocator.sizes import GiB
from torch_tiers.monitor.verdict import ENTER

NONE = "none"
WHAT = ("training", "preprocessing")
FASTER = 1.10  # that training is to be with the monitor where the bus is saturated
NO_SLOWER = 0.98  # that it is to be everywhere
POLITE = 0.95  # of what preprocessing reaches beside plain training
REACTION, RECOVERY = 5, 50  # steps
LONG = 1.4  # of a step
WATCHING = 0.01  # of a core, for the monitor's thread


@dataclass(frozen=True, slots=True)
class Cell:
    """One variant beside one load in one round.

    Attributes
    ----------
    training : float
        Samples per second; 0 where nothing trained.
    preprocessing : float
        What the load did, in its unit per second.
    plain_training, plain_preprocessing : float
        The same in the turns of plain training.
    moved : float
        Bytes a step, both directions.
    stalls, pages, flushes
        A step, as in `counts.per_step`.
    cores : float
        Processor seconds a second that the training process took, all of its threads.
    share : float
        Of the usual demand that the monitor left at the end; 1 without it.
    host_us : float
        Median host time that handing an iteration to the monitor took on the training thread, in microseconds.
    monitor_cores : float
        Processor seconds a second of training that the monitor's thread took.
    steps
        Seconds of each timed step, turn by turn, by the host. It runs ahead of the device, until the end of a turn.
    lanes
        Of what the lane that gave least should give, the part that it gave, as known after each step beside the load
        until the monitor made room; None where it had not looked again.
    reaction : int, optional
        The step beside the load in which it did; None where it did not.
    recovery : int, optional
        The step after the end of the load in which it left all there is again; None where that was not measured.
    settled : bool
        Whether nothing had changed for some steps when it was timed.
    """

    round: int
    load: str
    variant: str
    training: float
    preprocessing: float
    plain_training: float = 0.0
    plain_preprocessing: float = 0.0
    moved: float = 0.0
    stalls: Mapping[str, float] = field(default_factory=dict)
    pages: Mapping[str, float] = field(default_factory=dict)
    flushes: float = 0.0
    cores: float = 0.0
    share: float = 1.0
    host_us: float = 0.0
    monitor_cores: float = 0.0
    steps: tuple[tuple[float, ...], ...] = ()
    lanes: tuple[float | None, ...] = ()
    reaction: int | None = None
    recovery: int | None = None
    settled: bool = True
    changes: tuple[str, ...] = ()
    sm_clock: int | None = None

    @property
    def late(self) -> int | None:
        """Steps from the first reading of slow copies, as the next two were, until the monitor made room.

        Or until nobody waited for that any more; None where there are no such copies.
        """
        known = [(step, left) for step, left in enumerate(self.lanes) if left is not None]
        three = zip(known, known[1:], known[2:], strict=False)
        slow = next((step for (step, a), (_, b), (_, c) in three if max(a, b, c) < ENTER), None)
        return None if slow is None else (self.reaction or len(self.lanes)) - slow

    @property
    def held_up(self) -> tuple[float, ...]:
        """Seconds of the steps that took much longer than others did, but for the first and last of each turn.

        And longer than those of the turn on average, which are the device's: while the host is ahead its own are short.
        """
        middle = median([seconds for turn in self.steps for seconds in turn[1:-1]] or [0.0])
        usual = [(turn, LONG * max(middle, sum(turn) / len(turn))) for turn in self.steps if turn]
        return tuple(seconds for turn, most in usual for seconds in turn[1:-1] if seconds > most)


def of_plain(cells: Iterable[Cell], load: str, variant: str, what: str) -> float:
    """What `variant` reaches of what plain training does in the turns between, over all rounds; 0 if not measured."""
    found = [cell for cell in cells if (cell.load, cell.variant) == (load, variant)]
    plain = sum(getattr(cell, f"plain_{what}") for cell in found)
    return sum(getattr(cell, what) for cell in found) / plain if plain else 0.0


def middle(cells: Iterable[Cell], load: str, variants: Sequence[str], what: str) -> float:
    """The median over the rounds; 0 where there is no such cell."""
    return float(median([getattr(c, what) for c in cells if c.load == load and c.variant in variants] or [0.0]))


def table(cells: Sequence[Cell]) -> str:
    """One line a load: what plain training and the load reach, the parts of it beside tiers, what is to hold."""
    lines = [
        f"{'':<22}{'training':^26} | {'preprocessing':^33} | {'train':>7}{'':>7}{'GiB moved':>12}",
        f"{'load':<22}{'plain':>8}{'off':>9}{'on':>9} | {'alone':>8}{'plain':>8}{'off':>9}{'on':>8} | "
        f"{'on/off':>7}{'share':>7}{'off':>6}{'on':>6}",
    ]
    for load in dict.fromkeys(cell.load for cell in cells):
        training, prep = ([of_plain(cells, load, v, what) for v in ("off", "on")] for what in WHAT)
        plain_training, plain_prep = (middle(cells, load, ("off", "on"), f"plain_{what}") for what in WHAT)
        moved = [middle(cells, load, (v,), "moved") / GiB for v in ("off", "on")]
        lines.append(
            f"{load:<22}{plain_training:>8.2f}{''.join(f'{part:>9.3f}' for part in training)} | "
            f"{middle(cells, load, ('alone',), 'preprocessing'):>8.1f}{plain_prep:>8.1f}"
            f"{''.join(f'{part:>9.3f}' for part in prep)} | {_part(training[1], training[0]):>7}"
            f"{middle(cells, load, ('on',), 'share'):>7.2f}{''.join(f'{gib:>6.1f}' for gib in moved)}"
        )
    clocks = [cell.sm_clock for cell in cells if cell.sm_clock is not None]
    if clocks:
        lines.append(f"SM clock: {min(clocks)} to {max(clocks)} MHz, median {median(clocks):.0f}")
    host = [cell.host_us for cell in cells if cell.variant == "on"]
    if host:
        lines.append(f"host time to hand an iteration to the monitor: {median(host):.0f} us")
    lines += [f"still changing when timed: {c.load}, {c.variant}, round {c.round}" for c in cells if not c.settled]
    for cell in cells:
        if cell.held_up:
            what = ", ".join(f"{1e3 * seconds:.0f}" for seconds in cell.held_up)
            mapped = f"; {cell.pages['maps']:.0f} pages mapped a step" if cell.pages.get("maps") else ""
            lines.append(f"held up: {cell.load}, {cell.variant}, round {cell.round}: {what} ms{mapped}")
    lines += [f"{'holds' if holds else 'DOES NOT HOLD'}: {what}" for what, holds in promises(cells)]
    return "\n".join(lines)


def promises(cells: Sequence[Cell]) -> list[tuple[str, bool]]:
    """What the monitor is to hold, and whether it does in these cells."""
    found = []
    for load in dict.fromkeys(cell.load for cell in cells):
        off, on = (of_plain(cells, load, variant, "training") for variant in ("off", "on"))
        text = f"training beside {load}: with the monitor {_part(on, off)} of without"
        found.append((text, off > 0 and on >= NO_SLOWER * off))
        if load == NONE:
            continue
        late = [cell.late for cell in cells if cell.load == load and cell.late is not None]
        if late:
            text = f"beside {load} it makes room {', '.join(map(str, late))} steps after the first slow copies"
            found.append((text, max(late) <= REACTION))
        if middle(cells, load, ("on",), "share") < 1:
            found.append((f"training beside {load}, saturated: at least {FASTER:.2f}", on >= FASTER * off))
            found += [
                (f"after {load} it leaves all there is in step {cell.recovery}", cell.recovery <= RECOVERY)
                for cell in cells
                if cell.load == load and cell.recovery is not None
            ]
        polite = of_plain(cells, load, "on", "preprocessing")
        found.append((f"{load} keeps {polite:.3f} of what it reaches beside plain training", polite >= POLITE))
    taken = max((cell.monitor_cores for cell in cells), default=0.0)
    found.append((f"the monitor's thread takes {100 * taken:.1f}% of a core", taken <= WATCHING))
    return found


def _part(value: float, of: float) -> str:
    return f"{value / of:.3f}" if of else "-"
