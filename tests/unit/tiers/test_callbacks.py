"""The callbacks for trainers: what a session did, in the program's own logger."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import torch_tiers as tiers
from torch_tiers.callbacks.numbers import numbers

NAMES = {"tiers/hbm_peak_gib", "tiers/moved_gib", "tiers/fraction"}
STEPS = 12


def model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))


def train(steps: int) -> None:
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    for _ in range(steps):
        trained(torch.ones(256, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_numbers_are_those_of_the_session_and_there_are_none_without_one() -> None:
    assert numbers() == {}
    with tiers.session(allocator="torch", policy="move", hbm="1MiB", dram="1GiB") as session:
        train(STEPS)
        told = numbers()
        stats = session.stats()
    assert set(told) == NAMES and numbers() == {}
    assert told["tiers/hbm_peak_gib"] == stats["peak"]["hbm"] / (1 << 30) > 0
    assert told["tiers/moved_gib"] > 0 and 0 < told["tiers/fraction"] <= 1


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, base: str) -> None:
    """A package in the place of one that need not be installed, with the base class of its callbacks."""
    for part in [name[:at] for at, letter in enumerate(name + ".") if letter == "."]:
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    setattr(sys.modules[name], base, type(base, (), {}))


def made(monkeypatch: pytest.MonkeyPatch, module: str) -> Any:
    monkeypatch.delitem(sys.modules, f"torch_tiers.callbacks.{module}", raising=False)
    found = import_module(f"torch_tiers.callbacks.{module}")
    del sys.modules[f"torch_tiers.callbacks.{module}"]  # of the stand-in, which no other test may get
    monkeypatch.setattr(found, "numbers", lambda: {"tiers/moved_gib": 2.0})
    return found


def test_a_trainer_s_callback_logs_when_the_trainer_does(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "transformers", "TrainerCallback")
    module, logged = made(monkeypatch, "trainer"), list[dict[str, float]]()
    callback = module.TiersCallback(SimpleNamespace(log=logged.append))
    for should_log in (False, True, False):
        callback.on_step_end(None, None, SimpleNamespace(should_log=should_log), model=None)
    assert logged == [{"tiers/moved_gib": 2.0}]
    monkeypatch.setattr(module, "numbers", dict)
    callback.on_step_end(None, None, SimpleNamespace(should_log=True))
    assert len(logged) == 1, "there is no session"


def test_lightning_s_callback_logs_every_so_many_steps_where_there_is_a_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "lightning.pytorch", "Callback")
    callback, logged = made(monkeypatch, "lightning").TiersCallback(), list[dict[str, float]]()
    trained = SimpleNamespace(log_dict=logged.append)
    for loggers in (["a logger"], []):
        trainer = SimpleNamespace(loggers=loggers, log_every_n_steps=5)
        for batch in range(10):
            callback.on_train_batch_end(trainer, trained, None, None, batch)
    assert logged == [{"tiers/moved_gib": 2.0}] * 2


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return STEPS * 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((64,), index / 100)}


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_transformers_has_them_in_its_history(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from torch_tiers.callbacks.trainer import TiersCallback

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.inner(x).square().mean()}

    how = {"per_device_train_batch_size": 8, "max_steps": STEPS, "logging_steps": 4, "report_to": [], "use_cpu": True}
    arguments = transformers.TrainingArguments(str(tmp_path), **how, save_strategy="no", remove_unused_columns=False)
    with tiers.session(allocator="torch", policy="move", hbm="1MiB", dram="1GiB"):
        trainer = transformers.Trainer(Wrapped(), arguments, train_dataset=Samples())
        trainer.add_callback(TiersCallback(trainer))
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "tiers/moved_gib" in entry]
    assert [entry["step"] for entry in logged] == [4, 8, 12] and logged[-1]["tiers/hbm_peak_gib"] > 0


@pytest.mark.filterwarnings("ignore")
def test_lightning_has_them_in_its_logger(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.loggers import CSVLogger

    from torch_tiers.callbacks.lightning import TiersCallback

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return self.inner(batch["x"]).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    with tiers.session(allocator="torch", policy="move", hbm="1MiB", dram="1GiB"):
        logger = CSVLogger(str(tmp_path))
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        trainer = lightning.Trainer(
            max_steps=STEPS, log_every_n_steps=4, logger=logger, callbacks=[TiersCallback()], accelerator="cpu", **quiet
        )
        trainer.fit(Module(), torch.utils.data.DataLoader(Samples(), batch_size=8))
    logger.save()
    written = (Path(logger.log_dir) / "metrics.csv").read_text()
    assert "tiers/moved_gib" in written and len(written.splitlines()) == 1 + 3
