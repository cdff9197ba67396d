"""Signed and claimed orders from the real command line, to a real service and real agents."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import planted
from tests.access.keys import make_key, read_public
from tests.chaos.world import FLEET, ROOT, World, chaos_policy

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed"),
    pytest.mark.timeout(600),
]


async def relaunch(world: World, *words: str, **more: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "starter.py"),
        *words,
        env={**world.environment, "RELAUNCH_NO_WARM": "1", **more},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    planted.check(f"the output of {words}", out)
    return process.returncode, " ".join(out.decode().split())


async def test_a_fleet_with_rules_from_the_command_line(world: World, tmp_path: Path) -> None:
    user, node = getpass.getuser(), world.names[0]
    ada, stranger = make_key(tmp_path, "ada"), make_key(tmp_path, "stranger")
    key = {"RELAUNCH_SSH_KEY": str(ada)}
    order = ("nodes", "quarantine", node, "--fleet", FLEET, "--reason", "a fan")
    release = ("nodes", "release", node, "--fleet", FLEET, "--reason", "mended")
    as_before = world.fleet_file.read_text()
    status, text = await relaunch(world, *order)
    assert status == 0, text  # without rules everyone may
    assert (await relaunch(world, *release))[0] == 0
    access = {
        "people": {
            "ada": {"role": "admin", "keys": [read_public(ada)]},
            user: {"role": "researcher"},
        },
        "unproven": ["submit"],
    }
    try:
        world.fleet_file.write_text(f"{as_before}access: {json.dumps(access)}\n")
        status, text = await relaunch(world, "nodes", "apply", "--fleet", FLEET)
        assert status == 0, text

        status, text = await relaunch(world, *order)
        assert status == 2, text
        assert f"(claimed) may not quarantine {node}: in fleet {FLEET} that takes" in text
        assert "which role admin has (ada)" in text
        status, text = await relaunch(world, *order, RELAUNCH_SSH_KEY=str(stranger))
        assert status == 2 and "signed with a key that the fleet file does not name" in text
        status, text = await relaunch(world, *order, RELAUNCH_SSH_KEY=str(tmp_path / "none"))
        assert status == 2 and "which cannot sign: " in text
        assert (await relaunch(world, *order, **key))[0] == 0
        status, text = await relaunch(world, "nodes", "show", node, "--fleet", FLEET)
        assert "by ada" in text and "by ada (claimed)" not in text
        assert (await relaunch(world, *release, **start_agent(tmp_path, ada)))[0] == 0

        repair = ("nodes", "repair", node, "--reboot", "--fleet", FLEET, "--reason", "it is slow")
        status, text = await relaunch(world, *repair)
        assert status == 1 and f"(claimed) may not reboot {node}" in text
        assert not (world.node(node) / "reboots.jsonl").exists()
        status, text = await relaunch(world, *repair, **key)
        journal = (world.node(node) / "reboots.jsonl").read_text().splitlines()
        [entry] = [json.loads(line) for line in journal]
        assert entry["by"] == "ada" and "it is slow" in entry["reason"]

        job = await world.submit(policy=chaos_policy(hang={}))
        await job.until_phase("RUNNING", generation=1)
        assert (await job.state()).submitted_by.endswith(" (claimed)")
        status, text = await relaunch(world, "cancel", job.name)
        assert status == 2 and f"may not cancel job {job.name} without proof" in text, text
        status, text = await relaunch(world, "retry", job.name, RELAUNCH_SSH_KEY=str(stranger))
        assert status == 2 and "may not retry" in text, text
        assert (await job.state()).generation == 1
        status, text = await relaunch(world, "cancel", job.name, **key)
        assert status == 0, text
        await job.until_phase("CANCELLED")
        await world.tidy(job)
    finally:
        world.fleet_file.write_text(as_before)
        await relaunch(world, "nodes", "apply", "--fleet", FLEET)
        for pid in AGENTS:
            os.kill(pid, signal.SIGTERM)


AGENTS: list[int] = []


def start_agent(folder: Path, key: Path) -> dict[str, str]:
    """Start an ssh-agent that has the key; return the environment that names its public half."""
    socket = folder / "agent"
    started = subprocess.run(
        ["ssh-agent", "-a", str(socket)], capture_output=True, text=True, check=True, timeout=100
    )
    AGENTS.append(int(started.stdout.partition("SSH_AGENT_PID=")[2].partition(";")[0]))
    agent = {"SSH_AUTH_SOCK": str(socket)}
    subprocess.run(
        ["ssh-add", "-q", str(key)], check=True, timeout=100, env={**os.environ, **agent}
    )
    # The private key is elsewhere: only the agent has it.
    alone = folder / "elsewhere"
    alone.mkdir()
    shutil.copy(key.with_name(f"{key.name}.pub"), alone / "ada.pub")
    return {**agent, "RELAUNCH_SSH_KEY": str(alone / "ada.pub")}
