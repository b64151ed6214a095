"""`tiers doctor`, `tiers probe` and a run tell the same of how GPU memory goes to a directory."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.ways_fakes import EVEN, FAST, MACHINE, PLACE, UUID, Timer
from torch_tiers.allocator.nvme import choose, decide
from torch_tiers.allocator.nvme.choose import choose_backends
from torch_tiers.allocator.nvme.facts import Machine, Place
from torch_tiers.allocator.nvme.posix import PosixFile
from torch_tiers.cli import doctor as doctor_verb
from torch_tiers.cli.main import main
from torch_tiers.probe import gds as probe_gds

MEASURED = Timer({"host": EVEN, "gds": FAST, "p2pdma": FAST})


class Straight(PosixFile):
    device_memory = True

    def __init__(self, directory: Path, *, mode: str) -> None:
        super().__init__(directory)


@pytest.mark.parametrize(
    ("machine", "place", "reason"),
    [
        (MACHINE, PLACE, None),
        (replace(MACHINE, nvidia_fs=False), PLACE, None),
        (replace(MACHINE, nvidia_fs=False, p2pdma=False), PLACE, "nvidia-fs is not loaded, and without it the kernel"),
        (replace(MACHINE, udev=False), PLACE, "/run/udev cannot be read"),
        (replace(MACHINE, gpu=None), PLACE, "no CUDA device"),
        (replace(MACHINE, kvikio=None), PLACE, "kvikio is not installed"),
        (MACHINE, replace(PLACE, kind="overlay"), "no direct way to overlay"),
        (MACHINE, replace(PLACE, drive="md0", raid="raid5"), "md raid5"),
    ],
)
def test_doctor_probe_and_run_agree(
    machine: Machine,
    place: Place,
    reason: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(decide, "read_machine", lambda gpu: machine)
    monkeypatch.setattr(decide, "read_place", lambda path: replace(place, path=path))
    monkeypatch.setattr(doctor_verb, "speeds", MEASURED)
    monkeypatch.setattr(choose, "_said", set())
    for module in (choose, probe_gds):
        monkeypatch.setattr(module, "KvikioFile", Straight)
    monkeypatch.setenv("TIERS_NVME", "1MiB")
    monkeypatch.setenv("TIERS_NVME_PATH", str(tmp_path))
    caplog.set_level(logging.INFO, "tiers")

    main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    told = next(finding for finding in findings if finding["subject"] == f"nvme {tmp_path}")
    probed = probe_gds.gds_obstacle([tmp_path])
    opener = choose_backends([tmp_path], "prefer", None, UUID, MEASURED)
    backend = opener(tmp_path)
    backend.close()

    assert backend.device_memory == opener.decision.direct == (reason is None)
    assert opener.decision.directories[tmp_path].describe() in told["found"]
    assert opener.decision.directories[tmp_path].describe() in caplog.text
    if reason is None:
        assert probed is None and "not direct" not in told["found"]
    else:
        assert reason in told["found"] and reason in caplog.text and reason in (probed or "")
        assert told["advice"] in (probed or "")
