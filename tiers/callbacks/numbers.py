"""The numbers that are logged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_tiers.allocator.sizes import GiB
from torch_tiers.assembly import Session
from torch_tiers.planning.answer import Answer
from torch_tiers.planning.in_dram import read_in_dram
from torch_tiers.run_directory import by_iteration, step_seconds
from torch_tiers.session import current


def numbers() -> dict[str, float]:
    """What the session of this process did so far; nothing without one.

    Returns
    -------
    dict
        ``tiers/hbm_peak_gib``: the most HBM that was taken so far; ``tiers/moved_gib``: what an iteration moves, both
        ways; once a plan is there ``tiers/fraction``: the speed, relative to that predicted with all memory.
    """
    session = current()
    if session is None:
        return {}
    stats = session.stats()
    each, _ = by_iteration(stats)
    told = {"tiers/hbm_peak_gib": stats["peak"]["hbm"] / GiB, "tiers/moved_gib": (each["d2h"] + each["h2d"]) / GiB}
    fraction = _fraction(session, stats)
    return told if fraction is None else told | {"tiers/fraction": fraction}


def _fraction(session: Session, stats: Mapping[str, Any]) -> float | None:
    """By the rules of ``tiers report``, of which this is the answer so far."""
    saver = session.runtime.saver()
    learner = next((mover.learner for mover in saver.movers.armed if mover.learner.plans), None) if saver else None
    if learner is None or learner.varies or len(learner.predictions) != 1:
        return None
    (prediction,) = learner.predictions
    if prediction is None:
        return None
    step = step_seconds(stats)
    measured = step and step * stats["steps"] / max(stats["iterations"], stats["steps"], 1)
    peak, budget = stats["peak"]["hbm"], stats["budget"]["hbm"]
    ideal = prediction.ideal if prediction.is_sure_of_ideal and not read_in_dram(stats) else None
    answer = Answer(None, peak, budget, ideal, prediction.seconds, measured, varies=False)
    return 1 / answer.times_as_long if answer.times_as_long else None
