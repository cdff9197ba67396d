"""What a person sees on a terminal while bars are drawn and a rank is killed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs.terminal import COLUMNS, record

BAR = re.compile(r"^\[rank (\d)\] Epoch 0: +(\d+)%\|")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_bars_are_redrawn_and_each_restart_has_its_own(tmp_path: Path) -> None:
    screens = record(tmp_path)
    bars = {
        moment: [match.groups() for line in text.splitlines() if (match := BAR.match(line))]
        for moment, text in screens.items()
    }
    assert [rank for rank, _ in bars["both ranks draw"]] == ["0", "1"]
    # The bars of the first generation stay as the kill left them.
    assert [rank for rank, _ in bars["after the restart"]] == ["0", "1", "0", "1"]
    assert bars["at the end"][1] == ("1", "60")
    assert sorted(bars["at the end"][2:]) == [("0", "100"), ("1", "100")]
    assert all(len(line) <= COLUMNS for text in screens.values() for line in text.splitlines())
