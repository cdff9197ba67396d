"""Commands as people type them: real processes with their own environment and folder."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from temporalio.client import Client

ROOT = Path(__file__).resolve().parents[2]
STARTER = str(ROOT / "starter.py")


@dataclass
class Done:
    code: int
    out: str
    err: str


def bare_environment(changes: Mapping[str, str]) -> dict[str, str]:
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TEMPORAL_", "RELAUNCH_"))
        or name.startswith("RELAUNCH_ENCRYPTION_KEY")  # to run any suite with encryption
    }
    return {**ours, **changes}


async def starter(folder: Path, *words: str, **changes: str) -> Done:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        STARTER,
        *words,
        cwd=folder,
        env=bare_environment(changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = await process.communicate()
    return Done(process.returncode or 0, out.decode(), err.decode())


@dataclass
class Place:
    """A server with a worker, and a folder to stand in."""

    client: Client
    address: str
    folder: Path
    warm: Path

    async def starter(self, *words: str, **changes: str) -> Done:
        """Run a command in a process that has imported everything, as where `up` runs."""
        changes = {"RELAUNCH_STATE": str(self.warm), **changes}
        return await starter(self.folder, *words, TEMPORAL_ADDRESS=self.address, **changes)

    def write_job(self, name: str, *command: str) -> str:
        (self.folder / f"{name}.yaml").write_text(
            f"name: {name}\ncommand: {json.dumps(list(command) or ['wait'])}\nnodes: 2\n"
        )
        return f"{name}.yaml"


def one_sentence(done: Done, *words: str) -> None:
    lines = done.err.strip().splitlines()
    assert (done.code, done.out, len(lines)) == (2, "", 1), done
    assert all(word in lines[0] for word in words), lines[0]
