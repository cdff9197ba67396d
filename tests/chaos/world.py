"""A separate world to do harm in.

The real server on its SQLite file, worker.py as a process, and nodes on this machine.

Everything in it is killed when it is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import ChainMap
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from temporalio.client import Client
from temporalio.service import RPCError

from relaunch.backends.local import CUT, heal
from relaunch.cli import jobs
from relaunch.cli.client import GENERATION, PHASE
from relaunch.cli.jobs import JobSnapshot
from relaunch.cli.service import HOST, ONE_PARTITION, SERVER_OPTIONS, choose_port, find_server
from relaunch.cli.submit import submit
from relaunch.config import ConfigError
from relaunch.job.state import Incident, JobState
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import Policy, resolve
from relaunch.temporal import connect, ensure_namespace, read_server_id, read_start_time
from tests import planted
from tests.chaos.clocks import Clocks
from tests.chaos.disks import Disk
from tests.chaos.places import LocalPlaces, Places, SshPlaces, environments
from tests.invariants import find_unbalanced

if TYPE_CHECKING:
    from tests.chaos.rival import Rival

ROOT = Path(__file__).resolve().parents[2]
RANK_PROGRAM = Path(__file__).with_name("rank.py")
FLEET = "chaos"
QUEUE = "relaunch"
PATIENCE = 180.0
"""Seconds until a wait gives up: ten times the longest fence, because the machine may be busy with
other worlds."""
POLL = 0.05
QUERY_INTERVAL = 0.2
"""Seconds between queries of a job, which cost server and worker 20 ms of a core, where no moment
has to be met."""

TIMES = {
    "heartbeat": "0.5s",
    "lease": "3s",
    "lost_after": "2s",
    "fence_after": "1.5s",
    "stop_grace": "1s",
    "exit_barrier": "30s",
    "answer_within": "60s",
}
"""Seconds instead of minutes, in the relations of the default policy: a controller that is killed
is away for longer than a lease."""
HANG_AFTER = "8s"
"""Longer than a lost node needs to be noticed (a broken watch, then `lost_after`): a loss is not to
be taken for a hang."""

ENCRYPTION = "RELAUNCH_ENCRYPTION_KEY"
"""How the variables begin that tests pass on: with them, every suite runs with encryption."""

ENDS = ("SUCCEEDED", "FAILED", "CANCELLED")

Found = TypeVar("Found")


class Unmet(AssertionError):
    """Something did not happen in time, or should not have happened."""


async def eventually(
    what: Callable[[], Awaitable[Found | None]],
    why: str,
    patience: float = PATIENCE,
    pause: float = POLL,
) -> Found:
    """Poll until there is something that is neither None nor False.

    A server or a worker that is away at the moment is asked again.
    """
    deadline = time.monotonic() + patience
    seen: object = None
    while True:
        try:
            found = await what()
        except (RPCError, ConfigError) as error:
            seen = error
        else:
            if found is not None and found is not False:
                return found
            seen = found
        if time.monotonic() > deadline:
            raise Unmet(f"{why} (last seen: {seen})")
        await asyncio.sleep(pause)


class Process:
    """A child that the world kills and starts as it likes; its output goes to a file."""

    def __init__(
        self, name: str, command: list[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self.name, self._command, self._environment, self.log = name, command, environment, log
        self.running: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self.running is not None, f"the {self.name} was never started"
        return self.running.pid

    async def start(self) -> None:
        assert self.running is None or self.running.returncode is not None, f"{self.name} runs"
        with self.log.open("ab") as log:
            self.running = await asyncio.create_subprocess_exec(
                *self._command,
                env=self._environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def end(self, number: signal.Signals = signal.SIGKILL) -> int | None:
        """Send a signal and wait for the end; return the exit code."""
        if self.running is None:
            return None
        if self.running.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.running.send_signal(number)
        return await self.running.wait()


def free_port() -> int:
    """Return a port that no connection of another world gets before the server has bound it.

    The ports of the kernel may be given to one.
    """
    while True:
        with contextlib.suppress(ConfigError):
            return choose_port("server", random.randrange(12_000, 20_000))


@dataclass
class Job:
    """One job in a world, and the folder its ranks share."""

    world: World
    name: str
    folder: Path
    run_id: str
    is_counted: bool = False
    """Its accounts were checked after its end."""

    async def look(self) -> JobSnapshot:
        return await jobs.load_job(self.world.client, self.name)

    async def state(self) -> JobState:
        async def read_state() -> JobState | None:
            return (await self.look()).state

        return await eventually(read_state, f"the state of {self.name} cannot be read")

    async def phase(self) -> tuple[str, int]:
        """Phase and generation as everybody can see them, with no worker alive."""
        described = await jobs.describe(self.world.client, self.name)
        attributes = described.typed_search_attributes
        return str(attributes.get(PHASE)), int(attributes.get(GENERATION) or 0)

    async def until_phase(
        self, *phases: str, generation: int | None = None, patience: float = PATIENCE
    ) -> tuple[str, int]:
        async def reached() -> tuple[str, int] | None:
            phase, now = await self.phase()
            return (
                (phase, now)
                if phase in phases and (generation is None or now >= generation)
                else None
            )

        found = await self.until(
            reached,
            f"{self.name} is not {' or '.join(phases)} in generation {generation}",
            patience,
        )
        if found[0] in ENDS:
            await self.check_accounts()
        elif found[0] == "RUNNING" and (leaks := planted.list_processes()):
            raise planted.Leak(f"while {self.name} runs: {leaks}")
        return found

    async def check_accounts(self) -> None:
        """Check that the accounts of a job that has ended add up to the time that it took."""
        state = await self.state()
        if state.ended_at is None:
            return  # it was terminated, and nothing has counted since
        wrong = find_unbalanced(state)
        described = await jobs.describe(self.world.client, self.name)
        if described.raw_info.first_run_id == self.run_id:
            # The ledger began when the server says that the job did.
            first = self.world.client.get_workflow_handle(f"job/{self.name}", run_id=self.run_id)
            began = (await first.describe()).start_time
            if abs(state.submitted_at - began) > timedelta(seconds=1):
                wrong.append(f"{self.name} began at {began}, and counts from {state.submitted_at}")
        self.is_counted = True
        if wrong:
            raise Unmet("; ".join(wrong))

    async def until(
        self,
        what: Callable[[], Awaitable[Found | None]],
        why: str,
        patience: float = PATIENCE,
        pause: float = POLL,
    ) -> Found:
        """Do as `eventually`, and say what the job does where it does not come about."""
        try:
            return await eventually(what, why, patience, pause)
        except Unmet as unmet:
            raise Unmet(f"{unmet}; {self.name} is {await self._described()}") from None

    async def _described(self) -> str:
        with contextlib.suppress(RPCError, ConfigError):
            now = await self.look()
            return (
                f"{now.phase} because {now.state.reason if now.state else now.memo.get('reason')!r}"
            )
        return "its state cannot be read"

    async def until_steps(self, more: int = 3, patience: float = PATIENCE) -> None:
        """Wait until training has advanced by so many steps from now."""
        before = self.step() or 0

        async def advanced() -> bool:
            return (self.step() or 0) >= before + more

        await self.until(advanced, f"{self.name} does not advance from step {before}", patience)

    async def until_watched(self) -> None:
        """Wait until leases are renewed.

        Before its first renewal a node stops its ranks without asking.
        """
        before, seen = self.step() or 0, set[int]()

        async def renewed() -> bool:
            watch = (await self.look()).watch
            if watch is not None and watch.step is not None and watch.step > before:
                seen.add(watch.step)
            # A renewal follows each beat that the server has acknowledged: at the third one the
            # first has arrived.
            return len(seen) >= 3

        await self.until(renewed, f"no watch of {self.name}", pause=QUERY_INTERVAL)

    def step(self) -> int | None:
        try:
            return int((self.folder / "checkpoint").read_text())
        except FileNotFoundError:
            return None

    async def incidents(self) -> list[Incident]:
        found, missing = await jobs.incidents(self.world.client, QUEUE, await self.look())
        assert missing is None, missing
        return found

    def lines(self, name: str) -> list[dict[str, Any]]:
        try:
            text = (self.folder / name).read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines()]

    def starts(self) -> list[dict[str, Any]]:
        return self.lines("starts")

    def rank_pids(self, node: str | None = None) -> list[int]:
        """Living ranks, of whatever generation."""
        carrying = f"RELAUNCH_TOKEN={self.world.job_path(self.name)}/".encode()
        at = (
            None
            if node is None
            else b"RELAUNCH_NODE_STATE=" + os.fsencode(self.world.node(node).resolve())
        )
        return [
            pid
            for pid, variables in environments()
            if any(v.startswith(carrying) for v in variables) and (at is None or at in variables)
        ]

    def on(self, node: str) -> Path:
        """What a node keeps of this job."""
        key = hashlib.sha256(self.world.job_path(self.name).encode()).hexdigest()[:16]
        return self.world.node(node) / "jobs" / key

    def highest(self, node: str, what: str) -> int | None:
        """The highest generation that a node has `prepared` or `stopped`."""
        try:
            known = json.loads((self.on(node) / "highest.json").read_text())[what]
        except FileNotFoundError:
            return None
        return int(known[1]) if known else None

    def generation_folder(self, node: str) -> Path | None:
        """The newest generation that a node knows of this job."""
        folders = [path for path in self.on(node).glob("*-*") if path.is_dir()]
        return max(
            folders,
            key=lambda path: tuple(int(part) for part in path.name.split("-")),
            default=None,
        )

    def agent_pid(self, node: str, who: str) -> int | None:
        """The living `shim` or `supervisor` of the newest generation on a node."""
        folder = self.generation_folder(node)
        try:
            known = json.loads((folder / f"{who}.json").read_text()) if folder else None
        except FileNotFoundError:
            return None
        return known["pid"] if known and read_start_time(known["pid"]) == known["started"] else None

    def warm_pids(self, node: str) -> tuple[int, int] | None:
        """The process that waits beside the newest generation on a node, and its Python."""
        try:
            known = json.loads((self.on(node) / "warm" / "standby.json").read_text())
        except FileNotFoundError:
            return None
        if read_start_time(known["pid"]) != known["started"] or known["python"] is None:
            return None
        return known["pid"], known["python"]

    def let_end(self) -> None:
        (self.folder / "stop").touch()

    async def signal(self, name: str, message: Mapping[str, Any] | None = None) -> None:
        async def sent() -> bool:
            await jobs.handle_of(self.world.client, self.name).signal(name, message or {})
            return True

        await eventually(sent, f"{name} cannot be sent")


@dataclass
class World:
    folder: Path
    number: int = 0
    """Worlds side by side have addresses of their own."""
    nodes: int = 2
    spares: int = 2
    python: str = sys.executable
    worker_program: tuple[str, ...] = (sys.executable, str(ROOT / "worker.py"))
    gpus: int = 0
    repairs: str = "act"
    answer_within: float = 2.0
    """Seconds; an unloaded node needs 0.01."""
    backend: str = "local"
    apart: bool = False
    """Whether nodes of the backend `ssh` have networks of their own."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the backend `ecs`: more of the fleet file's `ecs`."""
    delay: float = 0.0
    """Seconds by which each byte between the controller and nodes of the backend `ssh` is late."""
    warm: bool = False
    """Whether jobs import ahead, and have a Python that waits within a second of a launch."""
    disks: bool = False
    """Whether each node's state folder is on a separate disk."""
    clocks: bool = False
    """Whether the clocks of the worker and of nodes of the backend `ssh` can be stepped."""
    clocks_of: dict[str, Clocks] = field(default_factory=dict)
    """By `worker` and by node."""
    disks_of: dict[str, Disk] = field(default_factory=dict)
    rival: Rival | None = None
    """Another server with the same names and nodes, where a round has needed one."""
    places: Places = field(init=False)
    fleet_file: Path = field(init=False)
    server: Process = field(init=False)
    worker: Process = field(init=False)
    client: Client = field(init=False)
    web_ui: str = field(init=False)
    """Address of the server's web UI."""
    made: list[Job] = field(default_factory=list)
    others: list[Process] = field(default_factory=list)
    """Workers beside the one."""

    async def __aenter__(self) -> World:
        self.folder.mkdir(parents=True, exist_ok=True)
        state, self.fleet_file = self.folder / "state", self.folder / "chaos.yaml"
        state.mkdir(mode=0o700)
        planted.folders.add(self.folder)
        addresses = {name: self.address(name) for name in self.names}
        if self.clocks:
            self.clocks_of = {
                whose: Clocks(self.folder / "clocks" / whose) for whose in ("worker", *self.names)
            }
        self.places = self._places(addresses)
        self.write_fleet()
        port, ui = free_port(), free_port()
        self.web_ui = f"http://{HOST}:{ui}"
        self.environment = {
            **{
                key: value
                for key, value in os.environ.items()
                # The last: a user's shell has none, and with it output is not as it is there.
                if not key.startswith(("RELAUNCH_", "TEMPORAL_", "OTEL_", "PYTHONUNBUFFERED"))
                or key.startswith(ENCRYPTION)
            },
            "TEMPORAL_ADDRESS": f"{HOST}:{port}",
            "RELAUNCH_STATE": str(state),
            "RELAUNCH_FLEETS": str(self.fleet_file),
            "RELAUNCH_ANSWER_WITHIN": str(self.answer_within),
            **({"RELAUNCH_WARM_DELAY": "0.2"} if self.warm else {}),
            **self.places.environment,
        }
        ports = ["--ip", HOST, "--port", str(port), "--ui-port", str(ui)]
        options = [word for pair in (*SERVER_OPTIONS, *ONE_PARTITION) for word in pair]
        command = [
            str(find_server()),
            "server",
            "start-dev",
            *ports,
            "--db-filename",
            str(self.folder / "temporal.db"),
            "--log-level",
            "error",
            *options,
        ]
        self.server = Process("server", command, self.environment, self.folder / "server.log")
        command = [*self.places.within, *self.worker_program]
        clock = self.clocks_of["worker"].variables if self.clocks else {}
        # Not a copy: a test may give the world other fleets, and start the worker again.
        environment = ChainMap(dict(clock), self.environment)
        self.worker = Process("worker", command, environment, self.folder / "worker.log")
        try:
            await self.places.serve(port)
            await self.server.start()

            async def connected() -> Client:
                client = await connect(state, f"{HOST}:{port}")
                await ensure_namespace(client)
                self.server_id = await read_server_id(client)
                return client

            self.client = await eventually(connected, "the server does not come up")
            await self.worker.start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def restore(self) -> None:
        """Undo what a test that failed has left: links that are cut, a server or a worker that is
        gone, workers beside the one."""
        for other in self.others:
            await other.end()
        self.others.clear()
        for name in self.names:
            if (self.node(name) / CUT).exists():
                heal(self.node(name))
        for process in (self.server, self.worker):
            if process.running is None or process.running.returncode is not None:
                await process.start()

    def write_fleet(
        self,
        nodes: Mapping[str, Mapping[str, object] | None] | None = None,
        **changes: Mapping[str, object],
    ) -> None:
        """Write the fleet file, with changes to lines of nodes and to objects such as `ssh`.

        Nodes by name; None leaves one out.
        """
        given = nodes or {}
        named, more = self.places.described()
        told = [
            {**one, "spare": str(i >= self.nodes).lower(), "gpus": self.gpus}
            for i, one in enumerate(named)
        ]
        told = [
            {**one, **(given.get(str(one["name"])) or {})}
            for one in told
            if given.get(str(one["name"]), {}) is not None
        ]
        lines = [
            f"  - {{{', '.join(f'{key}: {value}' for key, value in one.items())}}}" for one in told
        ]
        more = {
            key: {**value, **changes.get(key, {})} if isinstance(value, dict) else value
            for key, value in more.items()
        }
        # JSON, which is YAML too.
        head = [
            f"name: {FLEET}",
            f"backend: {self.backend}",
            f"repairs: {self.repairs}",
            *(f"{k}: {json.dumps(v)}" for k, v in more.items()),
        ]
        self.fleet_file.write_text("\n".join((*head, "nodes:", *lines)) + "\n")

    async def run_starter(self, *words: str) -> tuple[int, str]:
        """Run the command line; return its exit code and what it printed."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(ROOT / "starter.py"),
            *words,
            env={**self.environment, "RELAUNCH_NO_WARM": "1"},
            stdin=subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await process.communicate()
        assert process.returncode is not None
        planted.check(f"the output of {words}", out)
        return process.returncode, out.decode()

    def _places(self, addresses: dict[str, str]) -> Places:
        prepare = self._mount_disk if self.disks else None
        if self.backend == "ssh":
            clocks = {name: clocks.variables for name, clocks in self.clocks_of.items()}
            return SshPlaces(self.folder, addresses, self.apart, self.delay, prepare, clocks)
        if self.backend == "ecs":
            # Here and not above: other worlds need not wait for the import of moto.
            from tests.chaos.ecs_places import EcsPlaces

            return EcsPlaces(self.folder, addresses, self.gpus, **self.options)
        return LocalPlaces(self.folder, addresses, prepare)

    def _mount_disk(self, name: str, state: Path) -> None:
        self.disks_of[name] = Disk(self.folder / "disks" / name, state)

    async def worker_elsewhere(self) -> Process:
        """Start another worker, on another machine.

        Nothing that the first one has written is there.
        """
        state = self.folder / "elsewhere"
        state.mkdir(mode=0o700)
        command = [*self.places.elsewhere, sys.executable, str(ROOT / "worker.py")]
        worker = Process(
            "worker elsewhere",
            command,
            {**self.environment, "RELAUNCH_STATE": str(state)},
            self.folder / "elsewhere.log",
        )
        self.others.append(worker)
        await worker.start()
        return worker

    async def __aexit__(self, error: object = None, *_: object) -> None:
        try:
            if error is None and hasattr(self, "client"):
                await self._check_accounts()
                planted.search()
        finally:
            await self._close()
            planted.folders.discard(self.folder)

    async def _check_accounts(self) -> None:
        """Check those of jobs whose end no test has waited for, where the server still runs."""
        if self.server.running is None or self.server.running.returncode is not None:
            return
        for job in [one for one in self.made if not one.is_counted]:
            with contextlib.suppress(RPCError, ConfigError):
                phase, _ = await job.phase()
                if phase in ENDS:
                    await job.check_accounts()

    async def _close(self) -> None:
        for worker in (self.worker, *self.others):
            await worker.end()
        for disk in self.disks_of.values():
            disk.thaw()
        await self.places.close()
        await self.server.end()
        for disk in self.disks_of.values():
            disk.close()

    @property
    def names(self) -> list[str]:
        return [f"n{number}" for number in range(1, self.nodes + self.spares + 1)]

    def address(self, name: str) -> str:
        return f"127.{80 + self.number}.0.{name[1:]}"

    def node(self, name: str) -> Path:
        """A node's state folder."""
        return self.places.state(name)

    def job_path(self, job: str) -> str:
        """How the tokens of a job begin: ranks on ECS name no server."""
        server = () if self.backend == "ecs" else (self.server_id,)
        return "/".join((*server, self.client.namespace, job))

    def sessions(self, name: str) -> list[int]:
        """The agent session of the worker on a node."""
        return self.places.sessions(name, self.worker.pid)

    async def submit(
        self,
        *,
        name: str | None = None,
        nodes: int = 2,
        nproc: int = 1,
        policy: Policy | None = None,
        rank: Iterable[str] = (),
        **spec: Any,
    ) -> Job:
        name = name or f"j{uuid.uuid4().hex[:8]}"
        folder = self.folder / "jobs" / name
        folder.mkdir(parents=True, exist_ok=True)
        # What waits in `sitecustomize` needs `site`; without that, Python starts in half the time.
        options = [] if self.warm else ["-S"]
        command = [self.python, *options, str(RANK_PROGRAM), str(folder), *rank]
        given = {
            "name": name,
            "command": command,
            "nodes": nodes,
            "nproc_per_node": nproc,
            "fleet": FLEET,
            **({"warm": ["decimal"]} if self.warm else {}),
            **spec,
        }  # `spec` may have another command
        if self.backend != "ecs":  # whose jobs name no secrets: their task definition does
            given = planted.add_to(given, self.folder)
        handle = await submit(
            self.client, QUEUE, JobSpec.model_validate(given), policy or chaos_policy()
        )
        job = Job(self, name, folder, handle.first_execution_run_id or "")
        self.made.append(job)
        return job

    async def vouch_for_nodes(self) -> None:
        """Release every node, so that harm of earlier rounds does not count in the next one."""
        # Here and not above: only rounds need it.
        from relaunch.activities.fleet import FLEET_ID_PREFIX

        fleet = self.client.get_workflow_handle(f"{FLEET_ID_PREFIX}{FLEET}")
        message = {"reason": "the round is over", "by": "chaos"}
        with contextlib.suppress(RPCError):  # no fleet runs yet
            for name in self.names:
                await fleet.signal("release", {"node": name, **message})
            await fleet.signal("resume", message)

    async def tidy(self, job: Job) -> None:
        """Make the nodes as good as new, whatever became of the job."""
        for disk in self.disks_of.values():
            disk.thaw()
            disk.free()
        for clocks in self.clocks_of.values():
            clocks.reset_wall()
        for name in self.names:
            self.places.heal(name)
        for process in (self.server, self.worker):
            if process.running is None or process.running.returncode is not None:
                await process.start()

        async def closed() -> bool:
            described = await jobs.describe(self.client, job.name)
            if described.close_time is None:
                await jobs.handle_of(self.client, job.name).terminate("its round is over")
            return described.close_time is not None

        await eventually(closed, f"{job.name} cannot be closed")
        planted.search()  # before what is there is removed
        for name in self.names:
            self.places.reboot(name)
            for what in ("jobs", "failpoints"):
                shutil.rmtree(self.node(name) / what, ignore_errors=True)
        await self.vouch_for_nodes()


def chaos_policy(times: Mapping[str, str] | None = None, **changes: Any) -> Policy:
    return resolve(
        {
            "hang": {"after": HANG_AFTER, "first_step": "30s"},
            **changes,
            "timeouts": {**TIMES, **(times or {})},
        }
    )
