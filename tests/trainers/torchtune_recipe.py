"""Recipes of torchtune, as `tune run` starts them: a LoRA, and all weights with the optimizer in backward.

Both have the loss in chunks. ``RECIPE`` is the name of the recipe.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch
import yaml
from torch.utils.data import Dataset

from tests.trainers.small import LENGTH, STEPS, WORDS, llama, tell, texts

LORA = "lora_finetune_single_device"
FULL = "full_finetune_single_device"
HEADS = {"num_heads": 4, "num_kv_heads": 2, "embed_dim": 128, "intermediate_dim": 384}
ADAPTERS = {"lora_attn_modules": ["q_proj", "v_proj", "output_proj"], "apply_lora_to_mlp": True}


class Words:
    """What the recipe asks of a tokenizer."""

    pad_id = 0


class Texts(Dataset[dict[str, Any]]):
    def __init__(self, tokenizer: Words) -> None:
        self.rows = [{"tokens": row, "labels": row} for row in texts(16 * STEPS).tolist()]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: list(row) for name, row in self.rows[index].items()}


def configured(recipe: str, folder: Path) -> dict[str, Any]:
    """The configuration that `tune cp` gives, with a small model."""
    model = {"vocab_size": WORDS, "num_layers": 4, "max_seq_len": LENGTH, **HEADS}
    if recipe == LORA:
        model |= {"_component_": "torchtune.models.llama3.lora_llama3", **ADAPTERS, "lora_rank": 8, "lora_alpha": 16}
        own = {"gradient_accumulation_steps": 2, "clip_grad_norm": 1.0}
        schedule = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
        own |= {"lr_scheduler": {"_component_": schedule, "num_warmup_steps": 5}}
    else:
        model |= {"_component_": "torchtune.models.llama3.llama3"}
        own = {"gradient_accumulation_steps": 1, "optimizer_in_bwd": True, "clip_grad_norm": None}
    return {
        "output_dir": str(folder / "out"),
        "model": model,
        "tokenizer": {"_component_": "tests.trainers.torchtune_recipe.Words"},
        "dataset": {"_component_": "tests.trainers.torchtune_recipe.Texts"},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(folder / "base"),
            "checkpoint_files": ["model.safetensors"],
            "recipe_checkpoint": None,
            "output_dir": "${output_dir}",
            "model_type": "LLAMA3",
        },
        "resume_from_checkpoint": False,
        "seed": 0,
        "shuffle": True,
        "batch_size": 8,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "epochs": 1,
        "max_steps_per_epoch": STEPS,
        "compile": False,
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": str(folder),
            "filename": "log.txt",
        },
        "log_every_n_steps": 1,
        "device": "cpu",
        "dtype": "fp32",
        "enable_activation_checkpointing": False,
        "enable_activation_offloading": False,
        **own,
    }


def main(folder: Path, recipe: str) -> None:
    from torchtune._cli.tune import main as tune

    llama().save_pretrained(folder / "base")
    (folder / "config.yaml").write_text(yaml.safe_dump(configured(recipe, folder)))
    sys.argv = ["tune", "run", recipe, "--config", str(folder / "config.yaml")]
    with suppress(SystemExit):  # it ends with exit code 0
        tune()
    losses = re.findall(r"loss:(\S+)", (folder / "log.txt").read_text())
    assert len(losses) == STEPS
    saved = sorted((folder / "out").rglob("*.safetensors"))
    tell(map(float, losses), {f"{path.name} {name}": each for path in saved for name, each in weights(path).items()})


def weights(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = safetensors.torch.load_file(path)
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
