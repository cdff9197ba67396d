"""Other builds of relaunch: copies of this checkout in which code, state and messages differ."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.world import ROOT, Process, World

WORKFLOW = "workflows/training_job/workflow.py"
FLEET = "workflows/fleet/workflow.py"
STATE = "relaunch/job/state.py"
FLEET_STATE = "relaunch/pool/state.py"
POLICY = "relaunch/spec/policy.py"
MESSAGES = "relaunch/pool/messages.py"


@dataclass(frozen=True, slots=True)
class Change:
    """A text of one file, and what it becomes; `{n}` is the number of the build."""

    path: str
    old: str
    new: str


BEGINS = """\
        if start.resume is not None:
            if "fleet" not in workflow.memo()"""
"""Where a run of a job goes on that continues another."""
COMMANDS = (
    Change(
        WORKFLOW,
        BEGINS,
        '        workflow.upsert_memo({{"build": "{n}"}})\n' + BEGINS,
    ),
    Change(
        FLEET,
        "        while True:\n            self._learn()\n",
        '        workflow.upsert_memo({{"build": "{n}"}})\n'
        "        while True:\n            self._learn()\n",
    ),
)
"""A command that no other build gives, first of all: histories of one build do not replay on
another."""
FIELDS = (
    Change(
        STATE,
        "    slow_nodes: tuple[SlowRecord, ...] = ()\n",
        '    slow_nodes: tuple[SlowRecord, ...] = ()\n    new_in_{n}: tuple[str, ...] = ("{n}",)\n',
    ),
    Change(
        FLEET_STATE,
        "    waiting_since: datetime | None = None\n",
        "    waiting_since: datetime | None = None\n    new_in_{n}: int = {n}\n",
    ),
    Change(POLICY, "    strict_lease: ", "    new_in_{n}: int = {n}\n    strict_lease: "),
    Change(MESSAGES, '    fewer: str = ""\n', '    fewer: str = ""\n    new_in_{n}: str = "{n}"\n'),
)
"""Fields of states and messages that no other build knows."""
BUG = (
    Change(
        WORKFLOW,
        BEGINS,
        BEGINS.replace(":\n", ':\n            raise RuntimeError("a bug of build {n}")\n', 1),
    ),
)
"""Every task of a job that has moved to it fails."""
HARMLESS = (Change(WORKFLOW, '"%s -> %s: %s"', '"build {n}: %s -> %s: %s"'),)
"""Histories of the build before replay on this one."""


@dataclass(frozen=True, slots=True)
class OtherBuild:
    id: str
    folder: Path

    async def start_worker(self, world: World) -> Process:
        """Start a worker of this build beside those that run."""
        worker = Process(
            f"worker of {self.id}",
            [sys.executable, str(self.folder / "worker.py")],
            {**world.environment, "RELAUNCH_BUILD": self.id},
            world.folder / f"worker-{self.id}.log",
        )
        world.others.append(worker)
        await worker.start()
        return worker

    def log(self, world: World) -> str:
        return (world.folder / f"worker-{self.id}.log").read_text()

    async def run(self, world: World, *words: str) -> tuple[int, str]:
        """Run the command line of this build."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(self.folder / "starter.py"),
            *words,
            env={**world.environment, "RELAUNCH_NO_WARM": "1", "RELAUNCH_BUILD": self.id},
            stdin=subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode()


def make_build(folder: Path, number: int, *changes: Change) -> OtherBuild:
    """Copy this checkout and change it. What is compiled already is copied with it, to start soon.

    Raises:
        AssertionError: the text of a change is not there exactly once: it is out of date.
    """
    build = OtherBuild(f"build-{number}", folder / f"build-{number}")
    build.folder.mkdir(parents=True)
    for path in ROOT.glob("*.py"):
        shutil.copy2(path, build.folder)
    for name in ("activities", "relaunch", "workflows"):
        shutil.copytree(
            ROOT / name,
            build.folder / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("*.pyc.*"),  # being written
        )
    for change in changes:
        path = build.folder / change.path
        text = path.read_text()
        assert text.count(change.old) == 1, f"{change.path} has not one {change.old!r}"
        path.write_text(text.replace(change.old, change.new.format(n=number)))
    return build
