"""The answer at one look: what a program needs, what it ran in, and how much longer its iterations took for that."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch_tiers.allocator.sizes import format_at_least, format_size
from torch_tiers.migrator.controller.planned import needs
from torch_tiers.migrator.model.links import Links
from torch_tiers.migrator.model.trace import Trace
from torch_tiers.planning.in_dram import read_in_dram
from torch_tiers.planning.why import LATE, Why
from torch_tiers.run_directory import step_range

WITHOUT_GPU = "1.4 to 1.9 times"  # see docs/limits.md
CLOSE = 0.2  # of what was predicted: an error up to this is told as a bound, and a larger one with its direction


@dataclass(frozen=True, slots=True)
class Answer:
    """What a run comes to.

    Attributes
    ----------
    needs : int or None
        Bytes of HBM that an iteration is predicted to need with everything kept; None if that is not known.
    ran_in, budget : int
        The peak of the whole run, and the budget, in bytes.
    ideal, predicted : float or None
        Seconds that an iteration is predicted to take with all that memory, and under the plan. The ideal is not known
        where operators read in DRAM: they were seen so alone.
    measured : float or None
        Seconds that it took, in the median.
    varies : bool
        Iterations differ from step to step, so nothing is predicted of one.
    demoted : int
        Bytes of `needs` that are of state and weights which lay in DRAM at the end.
    state_in_dram : int
        Those of the state.
    state_on_nvme : int
        Bytes of `needs` that are of state which lay on NVMe.
    in_dram : str
        What operators read in DRAM in each step, in words; empty if next to nothing.
    share : str or None
        What the budget was of what the program needed at its first plan, if it was set so: ``60%``.
    most_took : tuple of float or None
        Seconds that nine of ten iterations under the last plan lay between; None of too few.
    without_gpu : bool
        Host memory played the GPU's.
    device_seconds : float or None
        Seconds that the device computes in an iteration with everything kept, where its host holds it up by the model;
        None elsewhere.
    """

    needs: int | None
    ran_in: int
    budget: int
    ideal: float | None
    predicted: float | None
    measured: float | None
    varies: bool
    demoted: int = 0
    state_in_dram: int = 0
    in_dram: str = ""
    share: str | None = None
    most_took: tuple[float, float] | None = None
    without_gpu: bool = False
    device_seconds: float | None = None
    state_on_nvme: int = 0

    @property
    def of_predicted(self) -> tuple[float, float] | None:
        """How many times what was predicted nine of ten iterations took, at least and at most; None of too few."""
        if self.most_took is None or not self.predicted:
            return None
        low, high = self.most_took
        return low / self.predicted, high / self.predicted

    @property
    def error(self) -> float | None:
        """By what part of the prediction nine of ten iterations were off, at most; None of too few."""
        return None if self.of_predicted is None else max(abs(times - 1) for times in self.of_predicted)

    @property
    def times_as_long(self) -> float | None:
        """How many times as long an iteration takes as with all the HBM that it needs.

        As measured; but where much less was measured than predicted, the ideal is too long as well, and the
        prediction counts alone.
        """
        if not self.ideal or not self.predicted:
            return None
        overstated = self.measured is None or self.predicted > LATE * self.measured
        return max(1.0, (self.predicted if overstated or self.measured is None else self.measured) / self.ideal)

    @property
    def at_most(self) -> float | None:
        """How many times as long it takes at most, where the host is what the ideal waits for; None elsewhere.

        While an iteration is recorded the host takes longer than it does in the plain program, and nobody can tell by
        how much. The device does not.
        """
        if self.times_as_long is None or not self.device_seconds:
            return None
        return max(self.times_as_long, (self.measured or self.predicted or 0.0) / self.device_seconds)


def answer_of(trace: Trace, links: Links, stats: dict[str, Any], why: Why) -> Answer:
    """Answer for a run whose last trace this is, and whose stats.json held `stats`."""
    known = bool(why.result.ideal) and not why.varies
    step, parts = step_range(stats), stats["steps"] / max(stats["iterations"], stats["steps"], 1)
    lay_there = read_in_dram(stats)
    return Answer(
        # Of state and weights that lie in DRAM or on NVMe the trace knows nothing.
        needs(trace, links) + stats.get("demoted", 0) + stats.get("state_on_nvme", 0) if trace.others else None,
        stats["peak"]["hbm"],
        stats["budget"]["hbm"],
        why.result.ideal if known and not lay_there else None,
        why.predicted if known else None,
        why.measured or None,
        why.varies,
        stats.get("demoted", 0),
        stats.get("state_in_dram", 0),  # of which earlier versions did not tell
        lay_there,
        stats.get("budget_share"),
        None if step is None else (step[0] * parts, step[1] * parts),
        stats["device"] == "cpu",
        None if why.result.is_sure_of_ideal else why.result.device_seconds,
        stats.get("state_on_nvme", 0),
    )


def to_json(answer: Answer) -> dict[str, Any]:
    """The answer as JSON."""
    return {
        "needs": answer.needs,
        "demoted": answer.demoted,
        "state_in_dram": answer.state_in_dram,
        "state_on_nvme": answer.state_on_nvme,
        "ran_in": answer.ran_in,
        "budget": answer.budget,
        "budget_share": answer.share,
        "times_as_long": answer.times_as_long,
        "times_as_long_at_most": answer.at_most,
        "ideal_s": answer.ideal,
        "predicted_s": answer.predicted,
        "measured_s": answer.measured,
        "error": answer.error,
    }


def in_short(answer: Answer) -> str:
    """The answer in one line."""
    needed = "" if answer.needs is None else f"needs {format_at_least(answer.needs)} of hbm as predicted; "
    budget, peak = format_size(answer.budget), format_size(answer.ran_in)
    ran = f"its peak was {peak}, its budget {budget}" + ("" if answer.share is None else " from the first plan on")
    text = f"the program {needed}{ran}" if needed else ran
    times = answer.times_as_long
    if times is None:
        why = f": {answer.in_dram} lay in dram" if answer.in_dram else ""
        return f"{text}; what the budget costs cannot be told{why}"
    good = "" if answer.of_predicted is None else f" ({_told(answer)})"
    return f"{text}; an iteration took {_times(answer)} times as long as is predicted with all of that memory{good}"


def render(answer: Answer, hints: Sequence[str] = ()) -> Iterator[str]:
    """The answer in sentences, and after it `hints`, what would help."""
    budget, peak = format_size(answer.budget), format_size(answer.ran_in)
    ran = f"the budget was {budget}, and the peak of the whole run {peak}"
    if answer.share is not None:
        from_then_on = f"from the first plan on ({answer.share} of what was needed)"
        ran = f"the budget was {budget} {from_then_on}, and the peak of the whole run, with the steps before, {peak}"
    if answer.needs is None:
        yield ran
    else:
        yield f"with everything kept an iteration is predicted to need {format_at_least(answer.needs)} of hbm; {ran}"
    if answer.demoted:
        yield f"{format_size(answer.demoted)} of that, of optimizer state and weights, lay in dram at the end"
    if answer.state_on_nvme:
        yield f"{format_size(answer.state_on_nvme)} of that, of optimizer state, lay on nvme at the end"
    yield from _time(answer)
    yield from hints


def _time(answer: Answer) -> Iterator[str]:
    times, predicted, measured = answer.times_as_long, answer.predicted, answer.measured
    if answer.varies:
        yield "what the budget costs cannot be told: iterations differ from step to step"
        return
    if not predicted:
        yield "what the budget costs cannot be told: nothing was timed"
        return
    if times is None or not answer.ideal:
        yield (
            f"what the budget costs cannot be told, as {answer.in_dram} lay in dram in every step that was recorded; "
            "tiers bench measures it"
        )
    elif measured is None or predicted > LATE * measured:
        yield f"an iteration is predicted to take {_times(answer)} times as long as with all of that memory"
    elif measured > LATE * predicted:
        yield (
            f"an iteration takes {_times(answer)} times as long as is predicted with all of that memory; the plan "
            f"explains {predicted / answer.ideal:.2f} times, and the lines below say what else slows it down"
        )
    else:
        yield f"an iteration takes {_times(answer)} times as long as is predicted with all of that memory"
    if answer.at_most is not None:
        yield (
            "the GPU waits for the CPU, and recorded CPU times are too long, so the cost is known roughly, as a range; "
            "tiers bench measures it"
        )
    if measured is None:
        yield f"{_ms(predicted)} are predicted; how good that is cannot be told, as no iteration was measured"
    else:
        yield f"an iteration took {_ms(measured)} as measured, and {_ms(predicted)} as predicted; {_told(answer)}"
    if answer.without_gpu:
        yield f"without a GPU a program usually takes {WITHOUT_GPU} as long under torch-tiers, whatever the budget"


def _times(answer: Answer) -> str:
    """How many times as long, or between how many and how many."""
    least = f"{answer.times_as_long:.2f}"
    most = least if answer.at_most is None else f"{answer.at_most:.2f}"
    return least if most == least else f"{least} to {most}"


def _told(answer: Answer) -> str:
    """How good predictions are, as far as the iterations of the run itself tell."""
    if answer.of_predicted is None or answer.error is None:
        return "there were too few under the last plan to tell how good predictions are"
    if answer.error <= CLOSE:
        return f"nine of ten iterations were within {max(1, math.ceil(100 * answer.error))}% of what was predicted"
    low, high = answer.of_predicted
    return f"nine of ten iterations took {low:.2f} to {high:.2f} times what was predicted"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
