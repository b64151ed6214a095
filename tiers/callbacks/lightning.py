"""A callback for Lightning."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from torch_tiers.callbacks.numbers import numbers


class TiersCallback(Callback):  # type: ignore[misc, unused-ignore]  # the package may be absent
    """Log what tiers does to the module's loggers, every ``log_every_n_steps``.

    Examples
    --------
    >>> trainer = Trainer(callbacks=[TiersCallback()])  # doctest: +SKIP
    """

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log, where the trainer would."""
        if trainer.loggers and (batch_idx + 1) % trainer.log_every_n_steps == 0 and (told := numbers()):
            pl_module.log_dict(told)
