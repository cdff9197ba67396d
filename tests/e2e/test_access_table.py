"""Role by command by backend: each cell of the table in docs/access.md, typed in the real command
line, to a real service and real nodes. AWS is a test double.

The commands run in this process: each starts in milliseconds instead of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from relaunch.backends.ecs.reboots import JournalPhase
from relaunch.cli.app import main
from relaunch.spec.access import ROLES
from tests.access.keys import make_key, read_public
from tests.access.table import COLUMNS, OTHERS, ROWS, Row, format_table, read_page
from tests.chaos.ecs_places import EcsPlaces
from tests.chaos.world import FLEET, TIMES, World, eventually

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed"),
    pytest.mark.timeout(1800),
]
PEOPLE = {"researcher": "rita", "operator": "olaf", "admin": "ada", OTHERS: "mallory"}
NEIGHBOURS = {"researcher": "operator", "operator": "researcher", "admin": "researcher"}
"""Whose job is another's."""
NUMBERS = {"local": 31, "ssh": 32, "ecs": 33}
ASKS = {"causes": {one: [{"strategy": "ASK"}] for one in ("APPLICATION", "USER_INPUT", "UNKNOWN")}}
NODE = "n4"
"""No job has it."""
QUARANTINE, RELEASE = ("nodes", "quarantine", NODE), ("nodes", "release", NODE)
PAUSE, RESUME = ("nodes", "pause"), ("nodes", "resume")
AROUND = {
    "nodes quarantine NODE": ((), RELEASE),
    "nodes release NODE": (QUARANTINE, RELEASE),
    "nodes pause": ((), RESUME),
    "nodes resume": (PAUSE, RESUME),
}
"""What an admin orders before, so that an order has an effect, and after it."""


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=[*NUMBERS])
async def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    backend = request.param
    async with World(
        tmp_path_factory.mktemp("table") / "world",
        NUMBERS[backend],
        nodes=4,
        spares=0,
        backend=backend,
        answer_within=5.0,
    ) as made:
        yield made


class Table:
    """The people of a fleet with rules, their jobs, and what they are answered."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder = world, folder
        self.keys = {role: make_key(folder, name) for role, name in PEOPLE.items()}
        self.jobs: dict[str, str] = {}
        """The job of each role, which asks."""
        self.count = itertools.count(1)

    def write_rules(self) -> None:
        people = {
            PEOPLE[role]: {"role": role, "keys": [read_public(self.keys[role])]} for role in ROLES
        }
        with self.world.fleet_file.open("a") as file:
            file.write(f"access: {json.dumps({'people': people})}\n")

    async def type(self, role: str, proven: bool, *words: str) -> tuple[int, str]:
        """Type a command as a person; return the exit code and what it prints."""
        environment = {**self.world.environment, "LOGNAME": PEOPLE[role], "COLUMNS": "300"}
        environment["RELAUNCH_NO_WARM"] = "1"
        if proven:
            environment["RELAUNCH_SSH_KEY"] = str(self.keys[role])
        said = io.StringIO()
        before, typed = dict(os.environ), list(sys.argv)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["relaunch", *words]
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                code = await asyncio.to_thread(main)
        finally:
            sys.argv = typed
            os.environ.clear()
            os.environ.update(before)
        return code, " ".join(said.getvalue().split())

    async def read(self, job: str) -> dict[str, Any]:
        code, text = await self.type("admin", True, "show", job, "--json")
        assert code == 0, text
        shown: dict[str, Any] = json.loads(text)
        return shown

    async def until_phase(self, job: str, *phases: str) -> dict[str, Any]:
        async def reached() -> dict[str, Any] | None:
            shown = await self.read(job)
            return shown if shown["phase"] in phases else None

        return await eventually(reached, f"job {job} reaches none of {phases}", 300.0, 0.2)

    async def submit(self, role: str, proven: bool, *command: str) -> str:
        name = f"job-{next(self.count)}"
        file = self.folder / f"{name}.json"
        spec = {"name": name, "command": command, "nodes": 1, "fleet": FLEET}
        file.write_text(json.dumps({**spec, "policy": {**ASKS, "timeouts": TIMES}}))
        code, text = await self.type(role, proven, "submit", str(file))
        assert code == 0, text
        return name

    async def find_job(self, role: str, row: Row) -> str:
        """Return the job that a row is about, which waits for a person; a new one to cancel."""
        owner = role if row.owner == "own" else NEIGHBOURS.get(role, "researcher")
        job = self.jobs.get(owner, "")
        if not job or (await self.read(job))["ended"] is not None:
            job = self.jobs[owner] = await self.submit(owner, True, "false")
        await self.until_phase(job, "WAITING_FOR_PERSON")
        return job

    async def prepare(self, *words: str) -> None:
        if words:
            done = await self.type("admin", True, *words, "--fleet", FLEET, "--reason", "a test")
            assert done[0] == 0, done

    @contextlib.asynccontextmanager
    async def hold_down(self, reboots: bool) -> AsyncIterator[None]:
        """Keep an instance that is rebooted away until relaunch has seen that it is: the double
        is back sooner than it looks."""
        places = self.world.places
        if not reboots or not isinstance(places, EcsPlaces):
            yield
            return
        instance = places.instances[NODE]
        instance.machine.connects = False

        async def is_seen_away() -> bool:
            return any(one.startswith(JournalPhase.DOWN) for one in places.repair_tags(NODE))

        async def bring_back() -> None:
            await eventually(is_seen_away, f"{NODE} is not seen to be away", 300.0, 0.5)
            instance.connect()

        waiting = asyncio.create_task(bring_back())
        try:
            yield
        finally:
            waiting.cancel()
            instance.machine.connects = True

    async def order(self, role: str, proven: bool, row: Row) -> str:
        """Give the order of a row; return the refusal, or an empty text."""
        reason = ("--reason", "a cell of the table")
        fleet = ("--fleet", FLEET)
        command = row.words.split()
        match command:
            case ["submit"]:
                job = await self.submit(role, proven, "true")
                ended = await self.until_phase(job, "SUCCEEDED", "FAILED", "WAITING_FOR_PERSON")
                return str(ended["reason"]) if ended["phase"] != "SUCCEEDED" else ""
            case ["answer", _]:
                job = await self.find_job(role, row)
                words = ("answer", job, "snooze", "--within", "1h", *reason)
            case ["policy", "change", _]:
                job = await self.find_job(role, row)
                file = self.folder / "policy.yaml"
                limit = 10 + next(self.count)
                file.write_text(json.dumps({**ASKS, "timeouts": TIMES, "max_restarts": limit}))
                words = ("policy", "change", job, str(file), *reason)
            case [name, "JOB"]:
                job = await self.find_job(role, row)
                words = (name, job, *reason)
            case ["nodes", "pause" | "resume"]:
                words = (*command, *fleet, *reason)
            case ["nodes", "declare-dead", _]:
                # Of a node that no job has there is nothing to declare.
                job = await self.find_job("researcher", Row("", "declare-dead", "own"))
                (node,) = (await self.read(job))["nodes"]
                words = ("nodes", "declare-dead", node, "--force", *fleet, *reason)
            case ["nodes", name, _, *options]:
                level = ("--level", "0") if name == "repair" else ()
                words = ("nodes", name, NODE, *options, *level, *fleet, *reason)
            case _:
                raise AssertionError(f"no row of the table: {row}")
        before, after = AROUND.get(row.words, ((), ()))
        await self.prepare(*before)
        reboots = "--reboot" in words and proven and "repair" in ROLES.get(role, ())
        async with self.hold_down(reboots):
            code, text = await self.type(role, proven, *words)
        await self.prepare(*after)
        if " may not " in text:
            return text
        # A node without GPUs and without a switch has no resets and no power cycles.
        assert code == 0 or (row.permission == "repair" and f"{NODE}: " in text), (row, text)
        if command[0] == "cancel":
            await self.until_phase(job, "CANCELLED")
        return ""


async def test_each_role_gives_each_order(world: World, tmp_path: Path) -> None:
    table = Table(world, tmp_path)
    table.write_rules()
    cells = {
        (row.title, column): cell
        for line, row in zip(read_page()[2:], ROWS, strict=True)
        for column, cell in zip(COLUMNS, line.strip("| ").split(" | ")[1:], strict=True)
    }
    seen = dict(cells)
    tried = 0
    # What ends a job comes last.
    for row in sorted(ROWS, key=lambda one: one.permission == "cancel"):
        for role in COLUMNS if row.in_service else ():
            if row.owner == "own" and role == OTHERS:
                continue
            allowed = []
            for proven in (False, True):
                refusal = await table.order(role, proven, row)
                tried += 1
                if refusal:
                    name = PEOPLE[role]
                    is_known = proven and role != OTHERS
                    who = name if is_known else f"{name}@"
                    assert f"{who}" in refusal and ("(claimed)" in refusal) is not is_known, refusal
                else:
                    allowed.append(proven)
            seen[row.title, role] = {
                (): "refused",
                (True,): "signed",
                (False, True): "claimed",
            }.get(tuple(allowed), f"only without a signature {allowed}")
    assert tried == 2 * sum(len(COLUMNS) - (row.owner == "own") for row in ROWS if row.in_service)
    assert format_table(seen) == read_page()
