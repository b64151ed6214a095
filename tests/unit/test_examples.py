"""The examples: plain PyTorch, repeatable to the last bit, and clear about what they train on."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from examples import train_resnet
from examples.train_gpt import GPT, PRESETS, standard_library
from examples.train_resnet import Photographs, augment, decode, draw, load_photographs
from tests.unit import warm

ROOT = Path(__file__).parents[2]
GPT_STEP = re.compile(r"step \d+ loss \d+\.\d+ time \d+\.\d ms")


def run(script: str, *arguments: str) -> list[str]:
    with warm.interpreter():
        command = [sys.executable, str(ROOT / "examples" / script), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def losses(lines: list[str]) -> list[str]:
    return [line.split()[3] for line in lines if line.startswith("step ")]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_imports_nothing_of_ours(path: Path) -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert not imported & {"tiers", "migrator", "allocator"}


def test_gpt_prints_a_line_a_step_and_its_peak_and_equals_itself() -> None:
    arguments = ("--steps", "3", "--batch", "2", "--seq", "32", "--device", "cpu", "--deterministic")
    first, second = run("train_gpt.py", *arguments), run("train_gpt.py", *arguments)
    assert all(GPT_STEP.fullmatch(line) for line in first[:3])
    assert first[3].startswith("peak memory ")
    assert losses(first) == losses(second)
    assert len(set(losses(first))) == 3


def test_gpt_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    model = GPT(2, 32, 2, 16, vocabulary=256)
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 8] = (tokens[0, 8] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])


def test_gpt_reads_real_text_long_enough_for_every_preset() -> None:
    text = standard_library()
    assert b"import" in bytes(text[: 1 << 16].tolist())
    assert len(text) > 100 * max(preset.length for preset in PRESETS.values())


def test_resnet_losses_do_not_depend_on_the_workers() -> None:
    arguments = ("--steps", "2", "--batch", "4", "--size", "32", "--device", "cpu", "--deterministic")
    forked = run("train_resnet.py", *arguments, "--workers", "2", "--start-method", "fork")
    spawned = run("train_resnet.py", *arguments, "--workers", "1", "--start-method", "spawn")
    assert losses(forked) == losses(spawned)
    assert re.fullmatch(r"training [\d.]+ samples/s preprocessing [\d.]+ images/s", forked[-1])


def test_a_sample_follows_from_the_seed_and_its_index() -> None:
    images = [draw(0, side=64), draw(1, side=48)]
    first, second = Photographs(images, 8, 32, seed=3), Photographs(images, 8, 32, seed=3)
    assert torch.equal(first[5][0], second[5][0])
    assert not torch.equal(first[5][0], first[6][0])


@pytest.mark.parametrize("shape", [(64, 64), (7, 200), (200, 7), (1, 1)])
def test_augmenting_gives_the_size_asked_for_from_any_shape(shape: tuple[int, int]) -> None:
    image = np.random.default_rng(0).integers(256, size=(*shape, 3), dtype=np.uint8)
    for seed in range(20):
        sample = augment(image, 24, np.random.default_rng(seed))
        assert sample.shape == (3, 24, 24)
        assert sample.isfinite().all()


def test_drawn_images_are_announced_loudly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(train_resnet, "find_spec", lambda name: None)
    images = load_photographs(None)
    assert "WARNING: no photographs" in capsys.readouterr().out
    assert decode(images[0]).shape == (512, 512, 3)


def test_a_directory_without_photographs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no \.jpg, \.jpeg or \.png file"):
        load_photographs(tmp_path)


def test_a_directory_of_photographs_is_decoded(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image", reason="needs Pillow")
    file = io.BytesIO()
    pillow.fromarray(np.full((20, 30), 128, np.uint8)).save(file, "PNG")
    (tmp_path / "grey.PNG").write_bytes(file.getvalue())
    (image,) = load_photographs(tmp_path)
    assert decode(image).shape == (20, 30, 3)
