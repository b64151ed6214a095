"""The ways between GPU memory and a file: GPUDirect Storage, and kvikio's compatibility mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from allocator.errors import StoreError
from allocator.nvme.kvikio import KvikioFile, gds_refusal


class CompatFile(KvikioFile):
    """A `Backend` that uses kvikio's compatibility mode also where GPUDirect Storage would serve.

    Parameters
    ----------
    directory
        As of `KvikioFile`.
    """

    def __init__(self, directory: Path) -> None:
        import kvikio
        import kvikio.defaults

        super().__init__(directory, direct=False)
        self._cufile.close()
        with kvikio.defaults.set("compat_mode", kvikio.CompatMode.ON):
            self._cufile = kvikio.CuFile(f"/proc/self/fd/{self._posix.fileno()}", "r+")


def gds_obstacle(directories: Sequence[Path]) -> str | None:
    """Say why GPU memory cannot go straight to files in `directories`, or return None; opens one in each."""
    refusal = gds_refusal()
    if refusal is not None:
        return refusal
    for directory in directories:
        try:
            KvikioFile(directory, direct=True).close()
        except StoreError as error:
            return str(error)
    return None
