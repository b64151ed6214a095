"""``python -m torch_tiers`` is ``tiers``, for where the console script is not on the path."""

from __future__ import annotations

import sys

from torch_tiers.cli.entry import main

sys.exit(main())
