"""What the C++ part of the hooks calls by name is there: a method renamed in Python fails here, not in a run."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

from tests.unit.natively import built
from tests.unit.rig import Rig
from torch_tiers.migrator.program.optimizers import Optimizers
from torch_tiers.migrator.recompute.replays import Replay, Replays
from torch_tiers.migrator.recompute.verified import Verified
from torch_tiers.migrator.saved import native
from torch_tiers.migrator.saved.garbage import Allowance
from torch_tiers.migrator.saved.saver import Saver
from torch_tiers.migrator.saved.stack import OnStack
from torch_tiers.migrator.streams import Compute
from torch_tiers.migrator.tape.closure import Packs

NAMED = re.compile(r'InternFromString\("(\w+)"\)')
ARGUMENTS = {"count"}


def test_every_name_that_cpp_calls_is_a_method_or_attribute_of_what_it_is_called_on() -> None:
    rig = Rig()
    called_on = {
        "engine": rig.mover,
        **dict.fromkeys(("take", "restore", "checks", "dropped", "storages", "recorder", "verified"), rig.mover),
        **dict.fromkeys(("refused", "on", "look"), rig.mover.checks),
        "find": Verified,
        "replays": Saver(lambda device: None, lambda *_: None, lambda _: None, Allowance(), built()),
        "packs": Replays(mock.Mock(), lambda storage: False),
        "note": Packs(mock.Mock()),
        "compute": rig.engine,
        **dict.fromkeys(("hbm", "relieve", "prefetch"), rig.engine),
        "capturing": Compute,
        "drop": Saver,
        **dict.fromkeys(("inputs", "run", "makes"), Replay),
        **dict.fromkeys(("resting", "bypassed", "bypass", "paused"), OnStack()),
        "period_due": Optimizers(),
    }
    header = Path(native.__file__).with_name("slots.h").read_text()
    assert set(NAMED.findall(header)) - ARGUMENTS == called_on.keys()
    assert [name for name, of in called_on.items() if not hasattr(of, name)] == []
    rig.close()
