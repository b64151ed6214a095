"""What every test gets: no configuration of the developer's, and a seed of its own."""

from __future__ import annotations

import os
import random
import signal
import zlib

import pytest
from hypothesis import settings

settings.register_profile("tiers", deadline=None, print_blob=True, derandomize=True)
settings.register_profile("fresh", deadline=None, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stress", action="store_true", help="run the tests marked stress, too")
    parser.addoption("--fresh-seeds", action="store_true", help="draw new seeds for randomised tests")
    parser.addoption("--repeat", type=int, help="run only the tests that draw seeds, each so often, with new seeds")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("fresh" if fresh_seeds(config) else "tiers")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of what a shell starts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # and of the programs that tests interrupt


def fresh_seeds(config: pytest.Config) -> bool:
    return bool(config.getoption("--fresh-seeds") or config.getoption("--repeat"))


def pytest_make_parametrize_id(config: pytest.Config, val: object) -> str | None:
    """Call bytes by their number: what they hold may differ from run to run, which pytest-xdist refuses."""
    return f"{len(val)} bytes" if isinstance(val, bytes) else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if (times := metafunc.config.getoption("--repeat")) and "seed" in metafunc.fixturenames:
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(times))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--repeat"):
        items[:] = [item for item in items if "seed" in item.fixturenames]  # type: ignore[attr-defined]
    no_gpu = None
    for item in items:
        if item.get_closest_marker("stress") and not config.getoption("--stress"):
            item.add_marker(pytest.mark.skip(reason="long: run with --stress"))
        if item.get_closest_marker("gpu"):
            no_gpu = _gpu_is_missing() if no_gpu is None else no_gpu
            item.add_marker(pytest.mark.skipif(no_gpu, reason="no NVIDIA GPU that torch can use"))


def _gpu_is_missing() -> bool:
    import torch

    return not torch.cuda.is_available()


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No variable, no user config and no share of other processes reaches a test from outside."""
    for name in os.environ:
        if name.startswith("TIERS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "no-user-config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.getbasetemp() / "no-runtime-directory"))
    monkeypatch.setenv("TIERS_PLAN_CACHE", "0")  # what one test learns is no other's
    monkeypatch.setenv("TIERS_LEDGER", str(tmp_path_factory.getbasetemp() / "ledger"))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The test's own seed, the same in every run; pytest shows the line below when the test fails.

    ``--fresh-seeds`` draws another, ``--repeat 100`` a hundred others, and TEST_SEED repeats one.
    """
    if given := os.environ.get("TEST_SEED"):
        value = int(given)
    elif fresh_seeds(request.config):
        value = random.SystemRandom().randrange(2**31)
    else:
        value = zlib.crc32(request.node.nodeid.encode()) >> 1
    print(f"{request.node.name}: TEST_SEED={value}")
    return value
