"""A world whose nodes are hosts in namespaces, behind a switch that loses and delays packets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from relaunch.cli import jobs
from relaunch.spec.policy import Policy
from tests.backends.netns import Network
from tests.chaos.places import Lines, Places, SshPlaces
from tests.chaos.world import Job, World, chaos_policy, eventually
from tests.fence.hosts import PYTHON, Host, SwitchedNetwork

WRITE_INTERVAL_S = 0.02
NANOSECONDS = 1e9

WAKING_S = 5.0
"""Seconds after a pause of a whole host in which its ranks may still write: until its shim runs,
has compared its clock with its peers' (every 2 s where they are leased) and has killed them, on a
busy machine."""

Generation = tuple[int, int]
"""Submission and generation, as in a token: the later one is the greater."""


class SwitchedPlaces(SshPlaces):
    network: SwitchedNetwork

    def __init__(
        self,
        folder: Path,
        addresses: dict[str, str],
        user: str,
        variables: Mapping[str, Mapping[str, str]],
        has_disks: bool,
    ) -> None:
        """`variables`: of the environment of everything on a node, by the node's name."""
        self._user, self._has_disks = user, has_disks
        super().__init__(folder, addresses, apart=True, variables=variables)

    def _make_network(self, folder: Path, addresses: dict[str, str]) -> Network:
        return SwitchedNetwork(folder, addresses, self.key, has_disks=self._has_disks)

    def _host(self, folder: Path, name: str, address: str) -> Host:
        host = self.network.hosts[name]
        host.environment.update(self._variables.get(name, {}))
        host.start()
        return host

    def described(self) -> tuple[Lines, dict[str, object]]:
        nodes, more = super().described()
        assert isinstance(more["ssh"], dict)
        return nodes, {**more, "ssh": {**more["ssh"], "user": self._user, "python": PYTHON}}

    def state(self, name: str) -> Path:
        """Return where the agent of the host keeps its state, or would if it had any."""
        states = self.network.hosts[name].states()
        fallback = self.network.hosts[name].folder / "state"
        return max(states, key=lambda path: path.stat().st_mtime, default=fallback)

    def heal(self, name: str) -> None:
        host = self.network.hosts[name]
        self.network.set_links(name, "*")
        host.thaw()
        if host.process is None:
            host.start()

    def reboot(self, name: str) -> None:
        """End every process of the host and give it another boot id.

        Its sshd is up again afterwards.
        """
        host = self.network.hosts[name]
        host.kill_processes()
        for state in host.states():
            (state / "boot_id").write_text(uuid.uuid4().hex + "\n")
        host.start()

    def keep(self, name: str, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        host = self.network.hosts[name]
        shutil.copy(host.log, folder / "sshd.log")
        ignore = shutil.ignore_patterns("sock", "orders", "agents", "pynvml")
        for number, state in enumerate(host.states()):
            with contextlib.suppress(shutil.Error):  # what is replaced while it is copied
                shutil.copytree(
                    state, folder / f"state-{number}", ignore=ignore, dirs_exist_ok=True
                )

    def _end(self) -> None:
        self._links.close()
        self.network.close()


class LateWrites(NamedTuple):
    """Writes of one older generation on one host after a newer generation had started."""

    generation: Generation
    host: str
    lines: int
    first: float
    """Seconds after the first start of a rank of a newer generation."""
    last: float

    def __str__(self) -> str:
        what = f"ranks of {self.generation[0]}/{self.generation[1]} on {self.host}"
        return (
            f"{what} wrote {self.lines} times, {self.first:.2f} to {self.last:.2f} s after a newer "
            "start"
        )


@dataclass
class FenceJob(Job):
    world: FenceWorld

    def nodes(self, generation: int | None = None) -> list[str]:
        """Return the nodes of a generation of the newest submission (None: its newest), by rank."""
        starts = {parse_token(line["token"]): {} for line in self.starts()}  # type: ignore[var-annotated]
        for line in self.starts():
            starts[parse_token(line["token"])][line["rank"]] = line["node"]
        submission = max(starts)[0]
        found = starts[submission, generation or max(starts)[1]]
        return list(dict.fromkeys(found[rank] for rank in sorted(found)))

    def hosts(self) -> list[Host]:
        return [self.world.network.hosts[name] for name in self.nodes()]

    def ranks_on(self, host: Host, before: Generation | None = None) -> list[int]:
        """Return the living ranks of this job on a host, of all generations or before one."""
        found = []
        for pid in host.find("rank"):
            try:
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            carried = (os.fsdecode(v) for v in variables if v.startswith(b"RELAUNCH_TOKEN="))
            tokens = [parse_token(token) for token in carried if token.split("/")[-3] == self.name]
            if any(before is None or token < before for token in tokens):
                found.append(pid)
        return found

    def fail(self, rank: int = 0) -> None:
        """Have a rank raise."""
        (self.folder / f"fail.{rank}").write_text("ValueError: an attack")

    def first_starts(self) -> dict[Generation, int]:
        """Return when the first rank of each generation started."""
        found: dict[Generation, int] = {}
        for line in self.starts():
            token = parse_token(line["token"])
            found[token] = min(found.get(token, line["raw"]), line["raw"])
        return found

    def late_writes(self) -> list[LateWrites]:
        """Return the writes of generations that were not the newest any more when they wrote.

        What a paused host wrote in the moment after it woke is left out: no node can prevent that.
        """
        starts = self.first_starts()
        newer = {
            token: min((at for t, at in starts.items() if t > token), default=None)
            for token in starts
        }
        found: dict[tuple[Generation, str], list[float]] = defaultdict(list)
        try:
            lines = (self.folder / "writes").read_text().splitlines()
        except FileNotFoundError:
            return []
        for line in lines:
            token, _, host, raw = line.split()
            begun = newer[parse_token(token)]
            if (
                begun is not None
                and int(raw) > begun
                and not self.world.has_just_woken(host, int(raw))
            ):
                found[parse_token(token), host].append((int(raw) - begun) / NANOSECONDS)
        return [
            LateWrites(token, host, len(at), min(at), max(at))
            for (token, host), at in found.items()
        ]

    def started_twice(self) -> list[str]:
        counted = Counter((line["token"], line["rank"]) for line in self.starts())
        return [
            f"rank {rank} of {token} was started {n} times"
            for (token, rank), n in counted.items()
            if n > 1
        ]

    def locked(self) -> list[str]:
        """Return what ranks said that found the lock of another generation held.

        Those of hosts that were paused are left out: a paused rank holds its lock and does nothing.
        """
        where = {
            (line["token"].replace("/", "_"), str(line["rank"])): line["node"]
            for line in self.starts()
        }
        found = []
        for line in self.lines("violations"):
            token, rank, _ = line["alive"].rsplit(".", 2)
            if where.get((token, rank)) not in self.world.woken:
                found.append(f"{line['started']} on {line['node']} found {line['alive']} locked")
        return found

    def overlaps(self) -> list[str]:
        """Return each violation as a sentence: by stamps of the ranks, whatever else was late."""
        return [*map(str, self.late_writes()), *self.locked(), *self.started_twice()]

    async def until_generation(self, generation: int = 2, patience: float = 90.0) -> None:
        """Wait until a rank of at least this generation of the newest submission has started."""

        async def started() -> bool:
            newest = max(self.first_starts())
            return newest[1] >= generation

        await eventually(started, f"{self.name} does not launch generation {generation}", patience)

    async def until_ended_on(self, host: Host, patience: float = 90.0) -> bool:
        """Wait until all ranks of the job on the host were started by the newest generation.

        While there is one generation only, its ranks are meant. Return whether that came.
        """
        deadline = time.monotonic() + patience
        starts = self.first_starts()
        before = max(starts) if len(starts) > 1 else None
        while self.ranks_on(host, before):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.1)
        return True


def parse_token(token: str) -> Generation:
    _, _, submission, generation = token.rsplit("/", 3)
    return int(submission), int(generation)


@dataclass
class FenceWorld(World):
    backend: str = "ssh"
    answer_within: float = 2.0
    repairs: str = "observe"
    python: str = PYTHON
    user: str = "root"
    """Who logs in to the nodes."""
    has_disks: bool = False
    """Whether the folders of each host are on a separate disk."""
    woken: dict[str, list[int]] = field(default_factory=dict)
    """When hosts that were paused went on, by name: nanoseconds of CLOCK_MONOTONIC_RAW."""

    def _places(self, addresses: dict[str, str]) -> Places:
        variables = {name: clocks.variables for name, clocks in self.clocks_of.items()}
        return SwitchedPlaces(self.folder, addresses, self.user, variables, self.has_disks)

    async def __aenter__(self) -> FenceWorld:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        await super().__aenter__()
        return self

    @property
    def network(self) -> SwitchedNetwork:
        assert isinstance(self.places, SwitchedPlaces)
        return self.places.network

    def pause(self, host: Host) -> None:
        """Stop everything on a host, as if its machine were paused."""
        self.woken.setdefault(host.name, [])
        host.freeze()

    def resume(self, host: Host) -> None:
        self.woken[host.name].append(time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW))
        host.thaw()

    def has_just_woken(self, host: str, at: int) -> bool:
        return any(
            at - woken < WAKING_S * NANOSECONDS for woken in self.woken.get(host, ()) if at > woken
        )

    async def tidy(self, job: Job) -> None:
        """Make the nodes as good as new, whatever became of the job."""
        self.network.clear()
        self.woken.clear()
        self.write_fleet()
        for process in (self.server, self.worker):
            if process.running is None or process.running.returncode is not None:
                await process.start()

        async def closed() -> bool:
            described = await jobs.describe(self.client, job.name)
            if described.close_time is None:
                await jobs.handle_of(self.client, job.name).terminate("its round is over")
            return described.close_time is not None

        await eventually(closed, f"{job.name} cannot be closed")
        for name in self.names:
            self.places.reboot(name)
            for state in self.network.hosts[name].states():
                shutil.rmtree(state / "jobs", ignore_errors=True)
        await self.vouch_for_nodes()

    async def submit_ranks(
        self,
        times: Mapping[str, str] | None = None,
        rank: Iterable[str] = (),
        policy: Policy | None = None,
        **spec: Any,
    ) -> FenceJob:
        """Submit ranks that write on beside training, and stand still when a peer is gone."""
        words = ("--stand-still", "--write-on", str(WRITE_INTERVAL_S), *rank)
        name = spec.pop("name", None) or f"j{uuid.uuid4().hex[:8]}"
        folder = self.folder / "jobs" / name
        folder.mkdir(parents=True, exist_ok=True)
        for place in (folder, folder.parent):
            place.chmod(0o777)  # ranks may be another user's
        chosen = policy or chaos_policy(times, hang={"after": "6s", "first_step": "30s"})
        job = await self.submit(name=name, policy=chosen, rank=words, **spec)
        found = FenceJob(self, job.name, job.folder, job.run_id)
        self.made[-1] = found
        return found

    async def run_ranks(self, **more: Any) -> FenceJob:
        """Submit a job and wait until it trains and its leases have been renewed."""
        job = await self.submit_ranks(**more)
        await job.until_phase("RUNNING", patience=120.0)
        await job.until_steps(5)
        await job.until_watched()
        return job
