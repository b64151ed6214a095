"""What the C++ part of the hooks calls by name is there: a method renamed in Python fails here, not in a run."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.rig import Rig
from torch_tiers.migrator.program.optimizers import Optimizers
from torch_tiers.migrator.recompute.replays import Replay
from torch_tiers.migrator.saved import native
from torch_tiers.migrator.saved.saver import Saver
from torch_tiers.migrator.saved.stack import OnStack
from torch_tiers.migrator.streams import Compute

NAMED = re.compile(r'InternFromString\("(\w+)"\)')
ARGUMENTS = {"count"}


def test_every_name_that_cpp_calls_is_a_method_or_attribute_of_what_it_is_called_on() -> None:
    rig = Rig()
    called_on = {
        "engine": rig.mover,
        "take": rig.mover,
        "restore": rig.mover,
        "compute": rig.engine,
        **dict.fromkeys(("hbm", "relieve", "prefetch"), rig.engine),
        "capturing": Compute,
        **dict.fromkeys(("drop", "note"), Saver),
        **dict.fromkeys(("inputs", "run", "makes"), Replay),
        **dict.fromkeys(("resting", "bypassed", "bypass", "paused"), OnStack()),
        "period_due": Optimizers(),
    }
    header = Path(native.__file__).with_name("slots.h").read_text()
    assert set(NAMED.findall(header)) - ARGUMENTS == called_on.keys()
    assert [name for name, of in called_on.items() if not hasattr(of, name)] == []
    rig.close()
