"""Train a ResNet to tell photographs apart: ``python examples/train_resnet.py --depth 18``.

Plain PyTorch. DataLoader workers decode each photograph from its JPEG or PNG bytes and augment it at full
resolution, as a real input pipeline does. A sample follows from the seed and its index alone, so the losses,
printed with every digit, do not depend on the number of workers or on how they start.
"""

from __future__ import annotations

import argparse
import io
import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

LAYERS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
# The photographs among the images that scikit-image bundles; the others are test patterns.
PHOTOGRAPHS = (
    *(
        "astronaut.png",
        "camera.png",
        "chelsea.png",
        "coffee.png",
        "coins.png",
        "hubble_deep_field.jpg",
        "ihc.png",
    ),
    *("moon.png", "motorcycle_left.png", "motorcycle_right.png", "retina.jpg", "rocket.jpg"),
)
Image: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
NUMPY_MAGIC = b"\x93NUMPY"


class Residual(nn.Module):
    """A residual block: two 3x3 convolutions, or a bottleneck of 1x1, 3x3 and 1x1."""

    def __init__(self, width_in: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        width_out = 4 * width if bottleneck else width
        # (output width, kernel, stride) of each convolution; the bottleneck strides in its 3x3.
        convolutions = [(width, 3, stride), (width, 3, 1)]
        if bottleneck:
            convolutions = [(width, 1, 1), (width, 3, stride), (width_out, 1, 1)]
        path: list[nn.Module] = []
        inner = width_in
        for outer, kernel, step in convolutions:
            path.append(nn.Conv2d(inner, outer, kernel, step, padding=kernel // 2, bias=False))
            path += [nn.BatchNorm2d(outer), nn.ReLU(inplace=True)]
            inner = outer
        self.path = nn.Sequential(*path[:-1])  # the last ReLU comes after the sum
        self.shortcut = nn.Sequential()
        if stride != 1 or width_in != width_out:
            projection = nn.Conv2d(width_in, width_out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(width_out))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.path(x)
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    """A ResNet of four stages with `layers` blocks each; returns logits."""

    def __init__(
        self, layers: tuple[int, ...], *, classes: int = 1000, width: int = 64, bottleneck: bool = True
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks: list[nn.Module] = []
        width_in = width
        for stage, count in enumerate(layers):
            for k in range(count):
                stride = 2 if stage > 0 and k == 0 else 1
                blocks.append(Residual(width_in, width << stage, stride, bottleneck))
                width_in = (width << stage) * (4 if bottleneck else 1)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width_in, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


def load_photographs(directory: Path | None) -> list[bytes]:
    """Return encoded images: those in `directory`, else scikit-image's photographs, else drawn ones."""
    if directory is not None:
        paths = sorted(p for p in directory.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg", ".png"))
        if not paths:
            raise SystemExit(f"train_resnet.py: no .jpg, .jpeg or .png file in {directory}")
        return [path.read_bytes() for path in paths]
    package = find_spec("skimage")
    if package is not None and package.origin is not None:
        bundled = [Path(package.origin).parent / "data" / name for name in PHOTOGRAPHS]
        return [path.read_bytes() for path in bundled if path.exists()]
    print("WARNING: no photographs (pip install scikit-image, or --images DIR): training on drawn images,")
    print("WARNING: which need no decoding, so the preprocessing rate is not that of a real input pipeline.")
    return [draw(k) for k in range(12)]


def draw(k: int, side: int = 512) -> bytes:
    """Return a pattern of coloured waves in NumPy's file format."""
    rng = np.random.default_rng(k)
    y, x = np.mgrid[0:side, 0:side] / side
    waves = [np.sin(2 * np.pi * (a * x + b * y)) for a, b in rng.uniform(1, 20, (3, 2))]
    file = io.BytesIO()
    np.save(file, np.uint8(127.5 * (1 + np.stack(waves, axis=-1))))
    return file.getvalue()


def decode(encoded: bytes) -> Image:
    """Return the image as uint8 of shape (height, width, 3)."""
    if encoded.startswith(NUMPY_MAGIC):
        drawn: Image = np.load(io.BytesIO(encoded))
        return drawn
    import PIL.Image  # drawn images do without it

    return np.array(PIL.Image.open(io.BytesIO(encoded)).convert("RGB"))


def augment(image: Image, size: int, rng: np.random.Generator) -> Tensor:
    """Jitter the colours at full resolution, then crop, flip and resize; returns (3, size, size)."""
    # In NumPy, whose sums do not depend on the number of threads: samples must not depend on the worker.
    brightness, contrast, saturation = rng.uniform(0.6, 1.4, 3).astype(np.float32)
    x = image.astype(np.float32) * (brightness / 255)
    x = x.mean() + (x - x.mean()) * contrast
    grey = x.mean(axis=2, keepdims=True)
    x = np.clip(grey + (x - grey) * saturation, 0, 1)

    area, ratio = rng.uniform(0.08, 1), np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
    pixels = area * x.shape[0] * x.shape[1]
    height = min(x.shape[0], max(1, round((pixels / ratio) ** 0.5)))
    width = min(x.shape[1], max(1, round((pixels * ratio) ** 0.5)))
    top, left = rng.integers(x.shape[0] - height + 1), rng.integers(x.shape[1] - width + 1)
    crop = torch.from_numpy(x[top : top + height, left : left + width]).permute(2, 0, 1)
    if rng.random() < 0.5:
        crop = crop.flip(-1)
    resized = F.interpolate(crop[None], (size, size), mode="bilinear", antialias=True)[0]
    return (resized - 0.45) / 0.225


class Photographs(Dataset[tuple[Tensor, int, float]]):
    """Samples of (augmented image, which photograph it is, seconds it took to make)."""

    def __init__(self, encoded: list[bytes], samples: int, size: int, seed: int) -> None:
        self.encoded, self.samples, self.size, self.seed = encoded, samples, size, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int, float]:
        started = time.perf_counter()
        rng = np.random.default_rng((self.seed, index))
        label = int(rng.integers(len(self.encoded)))
        image = augment(decode(self.encoded[label]), self.size, rng)
        return image, label, time.perf_counter() - started


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a ResNet to tell photographs apart.")
    parser.add_argument("--depth", type=int, choices=LAYERS, default=18)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=224, help="side of the images the network sees")
    parser.add_argument("--images", type=Path, help="directory of photographs (default: scikit-image's)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--start-method", choices=("fork", "spawn"), default="fork")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ... (default: auto)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deterministic", action="store_true", help="use deterministic kernels only")
    arguments = parser.parse_args()
    if arguments.images is not None and find_spec("PIL") is None:
        parser.error("--images needs Pillow to decode them: pip install pillow")
    return arguments


def main() -> None:
    arguments, cuda = parse_arguments(), torch.cuda.is_available()
    device = torch.device(("cuda" if cuda else "cpu") if arguments.device == "auto" else arguments.device)
    torch.manual_seed(arguments.seed)
    if arguments.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)

    samples = arguments.steps * arguments.batch
    loader = DataLoader(
        Photographs(load_photographs(arguments.images), samples, arguments.size, arguments.seed),
        arguments.batch,
        num_workers=arguments.workers,
        multiprocessing_context=arguments.start_method if arguments.workers else None,
        pin_memory=device.type == "cuda",
    )
    model = ResNet(LAYERS[arguments.depth], bottleneck=arguments.depth >= 50)
    model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)

    working, started = 0.0, time.perf_counter()
    first = started
    for step, (images, labels, seconds) in enumerate(loader):
        images = images.to(device, memory_format=torch.channels_last, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value, now = loss.item(), time.perf_counter()
        print(f"step {step} loss {value!r} time {(now - started) * 1e3:.1f} ms", flush=True)
        working, started = working + seconds.sum().item(), now
    rate = samples * max(arguments.workers, 1) / working
    print(f"training {samples / (started - first):.1f} samples/s preprocessing {rate:.1f} images/s")


if __name__ == "__main__":
    main()
