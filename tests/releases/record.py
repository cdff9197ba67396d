"""Makes the recording of the version in pyproject.toml."""

from __future__ import annotations

import asyncio
import json
import platform
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import temporalio

from relaunch.agent.state import read_boot_id
from relaunch.cli.database import read_program
from relaunch.cli.service import find_server
from tests.releases.check import list_all
from tests.releases.files import lay_out, read_all
from tests.releases.payloads import find_types
from tests.releases.real import record_service
from tests.releases.recording import Recording
from tests.releases.scenarios import PLAYS, Stage

ROOT = Path(__file__).parents[2]
AT_ONCE = 4
"""Scenarios that are played at the same time: they wait most of their time."""


def read_version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


async def record(release: str, scenarios: Iterable[str] = PLAYS) -> Recording:
    """Play scenarios; all of them have every kind of payload."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stage = Stage(folder)
        gate = asyncio.Semaphore(AT_ONCE)

        async def play(scenario: str) -> None:
            async with gate:
                await PLAYS[scenario](stage)

        async with asyncio.TaskGroup() as plays:
            for scenario in scenarios:
                plays.create_task(play(scenario))
        histories, files, answers = await record_service(folder, folder / "archived")
        boot_id = read_boot_id(folder)
        laid = folder / "laid"
        lay_out(files, boot_id, laid)
        readings = read_all(laid)
    return Recording(
        release,
        _describe_makers(),
        _hide_machine(stage.histories | histories),
        (*stage.answers, *answers),
        files,
        boot_id,
        readings,
    )


def _hide_machine(histories: dict[str, Any]) -> dict[str, Any]:
    """Leave out the folder and the name of the machine that made the recording."""
    text = json.dumps(histories).replace(f"{ROOT}/", "")
    text = re.sub(r'"identity": "\d+@[^"]*"', '"identity": "1@host"', text)
    return dict(json.loads(text))


def list_missing(recording: Recording) -> list[str]:
    """Return the kinds of payloads that the code knows and that are not in the recording."""
    recorded = {payload.kind for payload in list_all(recording, recording.list_histories())}
    return sorted(set(find_types()) - recorded)


def _describe_makers() -> dict[str, str]:
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "commit": commit or "unknown",
        "temporalio": temporalio.__version__,
        "server": read_program(find_server()).server,
        "python": platform.python_version(),
    }
