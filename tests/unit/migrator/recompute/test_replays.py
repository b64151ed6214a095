"""When a thread's forward is recorded, and that nobody is kept from recording after it."""

from __future__ import annotations

from unittest import mock

import pytest

from torch_tiers.migrator.program.weights import Gathering
from torch_tiers.migrator.recompute.replays import Replays
from torch_tiers.migrator.tape.closure import Packs


class _Recorder:
    """Records for one thread at a time, as the process's does; an interrupt comes where a test says."""

    def __init__(self) -> None:
        self.is_recording = False
        self.interrupted: str | None = None

    def begin(self) -> bool:
        began, self.is_recording = not self.is_recording, True
        self._maybe_interrupted("begin")
        return began

    def packs(self) -> Packs:
        self._maybe_interrupted("packs")
        return mock.Mock()

    def stop(self) -> None:
        self.is_recording = False

    def settings(self) -> int:
        return 0

    def _maybe_interrupted(self, where: str) -> None:
        if self.interrupted == where:
            self.interrupted = None
            raise KeyboardInterrupt


@pytest.mark.parametrize("again", [True, False], ids=["after it", "after the end of its thread's"])
@pytest.mark.parametrize("where", ["begin", "packs"])
def test_a_forward_that_is_interrupted_as_its_record_begins_keeps_nobody_from_recording(
    where: str, *, again: bool
) -> None:
    """In a notebook nothing would have been recomputed from then on, in this session and in all after it."""
    recorder = _Recorder()
    replays = Replays(recorder, lambda storage: True)  # type: ignore[arg-type]
    gathering = mock.Mock(spec=Gathering, storages=())
    recorder.interrupted = where
    with pytest.raises(KeyboardInterrupt):
        replays.forward_begins(gathering)
    if again:
        replays.forward_begins(gathering)
        assert recorder.is_recording
    replays.end()
    assert not recorder.is_recording
