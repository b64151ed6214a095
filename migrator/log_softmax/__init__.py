"""The gradient of a log-softmax, written over the gradient that it is made of.

At its loss a language model needs most: every block's tensors are saved by then, and log-softmax's output, the
gradient of the loss and the one made of these two are float32, each as large as all logits. Nobody looks at the second
again once the third is there. `log_softmax.cpp` tells where that is so; it is built for the torch that is installed.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch

from torch_tiers.allocator.extension import CannotBuild, Extension

log = logging.getLogger("tiers")

SOURCE = Path(__file__).with_name("log_softmax.cpp")


class Overwriting:
    """The native part, loaded."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.PyDLL(str(library))  # which keeps the interpreter's lock: one call at a time
        self._library.tls_install.restype = ctypes.c_bool
        self._library.tls_install.argtypes = [ctypes.c_bool]
        self._library.tls_written_over.restype = ctypes.c_uint64

    def install(self) -> bool:
        """Have backward do so, on the devices whose tensors move, from now on; whether it could."""
        done: bool = self._library.tls_install(torch.cuda.is_available())
        if not done:
            log.info("log-softmax's backward is not PyTorch's, or cannot be told from it: its loss needs a third more")
        return done

    def uninstall(self) -> None:
        """Undo `install`."""
        self._library.tls_uninstall()

    @property
    def count(self) -> int:
        """How many gradients were written over in this process."""
        written: int = self._library.tls_written_over()
        return written


def build(cache_dir: Path) -> Path:
    """The library, from `cache_dir` if it has been built before.

    Raises
    ------
    CannotBuild
        If there is no compiler, or it does not compile.
    """
    root = Path(torch.__file__).parent
    extension = Extension(
        name="log-softmax",
        title="log-softmax's backward",
        sources=(SOURCE,),
        headers=(),
        includes=(root / "include" / "torch" / "csrc" / "api" / "include",),
        libraries=tuple(root / "lib" / name for name in ("libtorch_cpu.so", "libc10.so")),
    )
    return extension.build(cache_dir)


@cache
def load(library: Path) -> Overwriting:
    """The native part in a library.

    Raises
    ------
    CannotBuild
        If it does not load.
    """
    try:
        return Overwriting(library)
    except OSError as error:
        text = f"log-softmax's backward does not load: {error}; remove {library} to have it built again"
        raise CannotBuild(text) from error


def find(cache_dir: Path) -> Overwriting | None:
    """The native part; None where it cannot be had, which is said."""
    try:
        return load(build(cache_dir))
    except CannotBuild as missing:
        log.info("%s; a language model's loss needs a third more", missing)
        return None
