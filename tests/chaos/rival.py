"""A second server and worker, with the same namespace, names and nodes as those of a world."""

from __future__ import annotations

import contextlib
import sys
import uuid
from pathlib import Path

from temporalio.client import Client
from temporalio.service import RPCError

from relaunch.cli import jobs
from relaunch.cli.client import PHASE
from relaunch.cli.service import HOST, SERVER_OPTIONS, find_server
from relaunch.cli.submit import submit
from relaunch.spec.job import JobSpec
from relaunch.temporal import connect, ensure_namespace
from tests.chaos.world import (
    FLEET,
    QUEUE,
    RANK_PROGRAM,
    ROOT,
    Process,
    World,
    chaos_policy,
    eventually,
    free_port,
)

LAUNCH_TIMEOUT_S = 15.0


class Rival:
    """Of another team that was given the same hosts. Its jobs have the same names as ours."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._folder = world.folder / "rival"
        self._jobs: list[str] = []
        self.client: Client | None = None

    async def start(self) -> None:
        if self.client is not None:
            return
        world, state, port = self._world, self._folder / "state", free_port()
        state.mkdir(parents=True, mode=0o700)
        if (
            world.folder / "state" / "nodes"
        ).exists():  # local nodes: the same machine, so the same folders
            (state / "nodes").symlink_to(world.folder / "state" / "nodes")
        environment = {
            **world.environment,
            "TEMPORAL_ADDRESS": f"{HOST}:{port}",
            "RELAUNCH_STATE": str(state),
        }
        command = [
            str(find_server()),
            "server",
            "start-dev",
            "--ip",
            HOST,
            "--port",
            str(port),
            "--ui-port",
            str(free_port()),
        ]
        command += ["--db-filename", str(self._folder / "temporal.db"), "--log-level", "error"]
        command += [word for pair in SERVER_OPTIONS for word in pair]
        await world.places.serve(port)
        server = Process("rival server", command, environment, self._folder / "server.log")
        world.others.append(server)
        await server.start()

        async def connected() -> Client:
            client = await connect(state, f"{HOST}:{port}")
            await ensure_namespace(client)
            return client

        self.client = await eventually(connected, "the rival's server does not come up")
        words = [*world.places.elsewhere, sys.executable, str(ROOT / "worker.py")]
        worker = Process("rival worker", words, environment, self._folder / "worker.log")
        world.others.append(worker)
        await worker.start()

    async def submit(self, name: str, nodes: int) -> Path:
        """Submit a job of this name; return the folder that its ranks would share."""
        assert self.client is not None
        folder = self._folder / "jobs" / f"{name}-{uuid.uuid4().hex[:4]}"
        folder.mkdir(parents=True)
        command = [self._world.python, "-S", str(RANK_PROGRAM), str(folder)]
        spec = {"name": name, "command": command, "nodes": nodes, "fleet": FLEET}
        await submit(self.client, QUEUE, JobSpec.model_validate(spec), chaos_policy())
        self._jobs.append(name)
        return folder

    async def await_launch(self, name: str, patience: float = LAUNCH_TIMEOUT_S) -> str:
        """Wait until its job has had the time to be launched, or runs.

        Return its phase, and why it is in it.
        """
        client, phase = self.client, "unknown"
        assert client is not None

        async def launched() -> bool:
            nonlocal phase
            described = await jobs.describe(client, name)
            phase = str(described.typed_search_attributes.get(PHASE))
            return phase not in ("None", "QUEUED", "LAUNCHING")

        with contextlib.suppress(AssertionError):
            await eventually(launched, f"the rival's {name} is not launched", patience)
        state = (await jobs.load_job(client, name)).state
        return phase if state is None else f"{phase} ({state.reason})"

    async def withdraw(self) -> None:
        """Cancel its jobs, and wait until they have ended."""
        client = self.client
        if client is None:
            return
        while self._jobs:
            name = self._jobs.pop()

            async def ended(name: str = name) -> bool:
                described = await jobs.describe(client, name)
                if described.close_time is None:
                    await jobs.handle_of(client, name).signal(
                        "cancel", {"reason": "the round is over"}
                    )
                return described.close_time is not None

            try:
                await eventually(ended, f"the rival's {name} does not end", 30.0, 0.5)
            except AssertionError:
                try:
                    await jobs.handle_of(client, name).terminate("the round is over")
                except RPCError:
                    continue  # it ended meanwhile
