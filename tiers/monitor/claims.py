"""Who holds host memory of this node, as the ledgers say. Reads them only: see `allocator.host.ledger`."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from torch_tiers.allocator.holders import Holder
from torch_tiers.allocator.private import ACCESSIBLE, open_file, opened

_PREFIX = "dram-"


def holders_of_host_memory(places: Iterable[Path]) -> list[Holder]:
    """The processes with claims in the ledgers at `places`, the largest first; none where no ledger can be read."""
    found: dict[tuple[int, str], int] = {}
    for place in places:
        with suppress(OSError), opened(place, denied=ACCESSIBLE) as directory:
            for name in os.listdir(directory):
                if name.startswith(_PREFIX) and (nbytes := _held(name, directory)):
                    _, pid, *program = name.split("-")
                    of = int(pid) if pid.isdecimal() else 0, "-".join(program[:-1]) or "python"
                    found[of] = found.get(of, 0) + nbytes  # our allocator has a claim beside the arena's
    return sorted((Holder(nbytes, pid, program) for (pid, program), nbytes in found.items()), reverse=True)


def _held(name: str, directory: int) -> int:
    """Bytes of a claim; 0 of one that was given up, or whose process has ended, which others remove."""
    with suppress(OSError):
        file = open_file(name, directory)
        try:
            # Shared, and given back at once: who claims just now may take a dead one for alive, and finds room later.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # its owner lives
            return os.fstat(file).st_size
        finally:
            os.close(file)
    return 0
