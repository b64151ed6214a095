from __future__ import annotations

import pytest
import torch

from tests.scenarios.leaks import leave_nothing


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_a_thousand_steps_leave_nothing() -> None:
    leave_nothing(torch.device("cpu"), steps=1000)
