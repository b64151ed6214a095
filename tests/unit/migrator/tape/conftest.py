from __future__ import annotations

from collections.abc import Iterator

import pytest

from torch_tiers.migrator.tape.recorder import Recorder, load, obstacle


@pytest.fixture(scope="session")
def built() -> Recorder:
    """The recorder; built once, and kept where a program would find it."""
    from torch_tiers.places import cache_directory

    if (missing := obstacle(cache_directory())) is not None:
        pytest.skip(missing)
    recorder = load(cache_directory())
    assert isinstance(recorder, Recorder), recorder
    return recorder


@pytest.fixture
def recorder(built: Recorder) -> Iterator[Recorder]:
    """The same; a test that fails in the middle leaves no record behind."""
    yield built
    if built.is_recording:
        built.stop()
