"""A callback for the Trainer of `transformers`, and for those made of it, such as TRL's."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from torch_tiers.callbacks.numbers import numbers


class TiersCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]  # the package may be absent
    """Log what tiers does, whenever the trainer logs.

    Parameters
    ----------
    trainer : transformers.Trainer
        Whose log it goes to.

    Examples
    --------
    >>> trainer.add_callback(TiersCallback(trainer))  # doctest: +SKIP
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Log by the trainer itself: its reporters have had their turn once a callback's `on_log` is called."""
        if control.should_log and (told := numbers()):
            self._trainer.log(told)
