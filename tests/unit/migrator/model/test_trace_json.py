from __future__ import annotations

import json

import pytest
from hypothesis import given

from tests.unit.traces import traces
from torch_tiers.migrator.model import trace_json
from torch_tiers.migrator.model.trace import Site, Trace
from torch_tiers.migrator.model.trace_json import FORMAT


@given(traces())
def test_json_keeps_everything(trace: Trace) -> None:
    assert trace_json.read(trace_json.write(trace)) == trace


def test_json_keeps_the_kind_of_module() -> None:
    trace = Trace((Site("conv:0", 0, 64, 0, (1,), "Conv2d"),), positions=2)
    assert trace_json.read(trace_json.write(trace)) == trace


@pytest.mark.parametrize("header", [{"format": FORMAT + 1}, {}])
def test_another_format_is_refused(header: dict[str, int]) -> None:
    text = json.dumps({**header, "positions": 0, "sites": []})
    with pytest.raises(ValueError, match="record it again"):
        trace_json.read(text)
