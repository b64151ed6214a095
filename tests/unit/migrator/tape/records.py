"""What tests of records have in common."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch_tiers.migrator.tape.recorder import Recorder
from torch_tiers.migrator.tape.tape import Tape


def end(recorder: Recorder) -> Tape:
    """The tape of a record that is over; it is whole."""
    tape = recorder.end()
    assert tape is not None and tape.broken is None
    return tape


def names(tape: Tape) -> list[str]:
    return [each.name.removeprefix("aten::") for each in tape.operators]


def in_another_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
