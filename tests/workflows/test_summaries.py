"""What the web UI shows of an activity or a timer is not cut off."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

HISTORIES = sorted((Path(__file__).parents[1] / "histories").glob("*.json"))
SHOWN = 120
"""Characters that Temporal's web UI 2.54 shows of `type • summary` in a timeline."""


def shown_texts(history: Path) -> list[str]:
    """Return the text of each activity and timer, as the timeline has it before it is cut."""
    texts = []
    for event in json.loads(history.read_text())["events"]:
        summary = event.get("userMetadata", {}).get("summary")
        if summary is None:
            continue
        text = str(json.loads(base64.b64decode(summary["data"])))
        activity = event.get("activityTaskScheduledEventAttributes")
        texts.append(f"{activity['activityType']['name']} • {text}" if activity else text)
    return texts


@pytest.mark.parametrize("history", HISTORIES, ids=[one.stem for one in HISTORIES])
def test_no_recorded_summary_is_cut(history: Path) -> None:
    texts = shown_texts(history)
    assert texts and [text for text in texts if len(text) > SHOWN] == []
