"""What was found stays mended, and each target still takes inputs that are drawn.

`python -m tests.fuzz` draws for as long as one likes.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.properties import Excess, bounded, expect_colours, expect_page, expect_text
from tests.fuzz.targets import TARGETS, Target

CHEAP = 3
"""Inputs of a target's table that `make test` plays; `make long` plays all."""


@pytest.mark.long_after(variants=len(TARGETS))
@pytest.mark.parametrize("share", ["first", pytest.param("all", marks=pytest.mark.long)])
@pytest.mark.parametrize("one", TARGETS.values(), ids=TARGETS)
def test_what_was_found_stays_mended(one: Target, share: str) -> None:
    for value in one.found if share == "all" else one.found[:CHEAP]:
        one.check(value)
