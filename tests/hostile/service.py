"""The whole service over nodes of this machine, each of which can be made to lie.

A real server, a real worker, real agents.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from temporalio.api.enums.v1 import EventType, WorkflowTaskFailedCause
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from relaunch.backends.artifact import build_agent
from relaunch.backends.base import BackendError
from relaunch.backends.local import LocalBackend, reboot
from relaunch.backends.pipe import ProcessPipe
from relaunch.job.state import JobState, Phase
from relaunch.pool.state import FleetState, NodeStatus
from relaunch.spec.fleet import FleetSpec
from tests.payloads import read_failure
from tests.workflows.rig import Job, Rig, SimulatedFleets, policy, worker

LIAR = Path(__file__).with_name("liar.py")
NODES = ("n1", "n2", "n3")
UNHANDLED_COMMAND = WorkflowTaskFailedCause.WORKFLOW_TASK_FAILED_CAUSE_UNHANDLED_COMMAND
PATIENCE = 240.0
"""Seconds: the machine may be busy with others."""
RELEASE_TIMEOUT = 5.0
"""Seconds; a node that is examined is not released."""
MAX_MEMORY_KIB = 400 * 1024
"""That lies may take beside what the process has: lines of 8 MiB, and their values."""
TRAIN = """
import os, time
step = 0
while True:
    step += 1
    with open(os.environ["RELAUNCH_PROGRESS_FILE"], "w") as file:
        file.write(str(step))
    time.sleep(0.05)
"""
TIMEOUTS = {
    "heartbeat": "200ms",
    "lease": "2s",
    "lost_after": "1s",
    "fence_after": "500ms",
    "stop_grace": "200ms",
}
PATIENT = {**TIMEOUTS, "lease": "30s", "lost_after": "30s"}
"""Of the job on the honest node, which a busy machine must not lose."""


class HostileBackend(LocalBackend):
    """Nodes whose agents are spoken to through `liar.py`."""

    def __init__(self, spec: FleetSpec, state: Path, agent: Path, seed: int) -> None:
        super().__init__(spec, state, agent, answer_within=3.0)
        self.seed = seed
        for name in NODES:
            self.folder(name).mkdir(parents=True, mode=0o700)

    def liar(self, node: str) -> Path:
        """The folder of its switch."""
        folder = self.folder(node).parent.parent / "liars" / node
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def lie(self, node: str, rate: float, burst: int) -> None:
        temporary = self.liar(node) / "lying.new"
        temporary.write_text(json.dumps({"rate": rate, "burst": burst}))
        temporary.rename(self.liar(node) / "lying")

    def be_honest(self, node: str) -> None:
        (self.liar(node) / "lying").unlink(missing_ok=True)

    def count_lies(self, node: str) -> int:
        """How many lies it has told."""
        try:
            return (self.liar(node) / "told").stat().st_size
        except FileNotFoundError:
            return 0

    async def _connect(self, name: str) -> ProcessPipe:
        folder = self.folder(name)
        return await ProcessPipe.start(
            *(sys.executable, str(LIAR), str(self.liar(name)), str(self.seed)),
            *(sys.executable, str(self._agent), "session"),
            env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "RELAUNCH_AGENT_STATE": str(folder)},
        )


@dataclass
class Service:
    rig: Rig
    backend: HostileBackend
    seed: int
    sentences: set[str] = field(default_factory=set)
    """What was said of the liar: on the fleet's page, and on the pages of its jobs."""
    cancelled: int = 0
    out_of_service: str = ""
    """Why the fleet has taken the liar out of service."""

    async def submit(self, nodes: int, timeouts: dict[str, str] = TIMEOUTS) -> Job:
        terms = (
            policy(timeouts, hang={"after": "2s"})
            if timeouts is TIMEOUTS
            else policy(timeouts, hang={"after": "off"})
        )
        return await self.rig.submit(
            terms, nodes=nodes, ranks=1, command=[sys.executable, "-S", "-c", TRAIN], workdir="/tmp"
        )

    async def until(self, job: Job, *phases: Phase) -> JobState:
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while (state := await job.state()).phase not in phases:
            assert asyncio.get_running_loop().time() < deadline, (
                f"never {phases}: {state.phase} because {state.reason}; "
                f"{state.next}; {state.incident}"
            )
            await self.read_pages()
            await asyncio.sleep(0.1)
        return state

    async def read_pages(self) -> None:
        """Note what is said of nodes that make no sense."""
        try:
            state = await self.rig.fleet.query("state", result_type=FleetState)
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
            return  # the first job has yet to begin it
        said = [f"{one.name}: {one.probe.silent}" for one in state.nodes if one.probe is not None]
        for job in self.rig.jobs[-2:]:
            known = await job.state()
            said += [known.reason, *(f"{lost.node}: {lost.reason}" for lost in known.lost)]
            said += [
                str(incident)
                for incident in (*known.incidents, *([known.incident] if known.incident else []))
            ]
        self.sentences.update(
            text
            for text in said
            if "makes no sense" in text or "reports rank" in text or "agent said" in text
        )

    def has_named(self, node: str) -> bool:
        return any(node in text for text in self.sentences)

    async def until_named(self, node: str) -> None:
        """Wait until a page says that a node makes no sense, which lies to a job that uses it."""
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while not self.has_named(node):
            assert asyncio.get_running_loop().time() < deadline, f"{node} lies and is never named"
            await asyncio.sleep(0.1)
            await self.read_pages()

    async def until_given(self, job: Job, node: str) -> None:
        """Wait until a job runs.

        Where the fleet has taken a node out of service, a person releases it, if that can be.
        """
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while (state := await job.state()).phase is not Phase.RUNNING:
            fleet = await self.rig.fleet.query("state", result_type=FleetState)
            record = next(one for one in fleet.nodes if one.name == node)
            if record.status is not NodeStatus.IN_SERVICE or record.repair:
                self.out_of_service = record.reason or record.repair
                if asyncio.get_running_loop().time() > deadline - PATIENCE + RELEASE_TIMEOUT:
                    return
                await self.rig.fleet.signal(
                    "release", {"node": node, "reason": "it is to lie again", "by": "ada"}
                )
            assert asyncio.get_running_loop().time() < deadline, (
                f"never given {node}: {state.phase} because {state.reason}"
            )
            await asyncio.sleep(0.1)

    async def cancel(self, job: Job) -> Phase:
        """Cancel, whatever it does at the moment, and return how it ended."""
        await job.handle.signal("cancel", {"reason": "the round is over", "by": "ada"})
        state = await self.until(job, Phase.CANCELLED, Phase.FAILED, Phase.SUCCEEDED)
        self.cancelled += state.phase is Phase.CANCELLED
        return state.phase


@asynccontextmanager
async def serve(client: Client, folder: Path, seed: int) -> AsyncIterator[Service]:
    address = 130 + seed % 100
    nodes = [{"name": name, "address": f"127.{address}.7.{name[1:]}", "gpus": 1} for name in NODES]
    name = f"hostile-{uuid.uuid4().hex[:6]}"
    spec = FleetSpec.model_validate(
        {"name": name, "backend": "local", "repairs": "observe", "nodes": nodes}
    )
    agent = await asyncio.to_thread(build_agent, folder / "agent")
    backend = HostileBackend(spec, folder / "state", agent, seed)
    fleets = SimulatedFleets(spec, cast(Any, backend))
    rig = Rig(client, cast(Any, backend), fleets, f"q-{uuid.uuid4().hex[:8]}", folder)
    try:
        async with worker(client, rig.queue, fleets, folder, cached=100):
            try:
                yield Service(rig, backend, seed)
            finally:
                await rig.end_jobs()
                await rig.end_fleet()
    finally:
        for node in NODES:
            backend.be_honest(node)
        await backend.close()
        await asyncio.to_thread(_end_ranks, backend)


def _end_ranks(backend: HostileBackend) -> None:
    for node in NODES:
        reboot(backend.folder(node))


def _ignore(text: str) -> None:
    """Say nothing."""


async def attack(
    client: Client, folder: Path, *, messages: int, seed: int, say: Callable[[str], None] = _ignore
) -> str:
    """Have one node tell so many lies while jobs run beside it and on it; return a summary.

    Raises:
        AssertionError, TimeoutError: something other than the liar's own job was harmed.
    """
    order = random.Random(seed)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with serve(client, folder, seed) as service:
        backend = service.backend
        honest = await service.submit(1, PATIENT)
        began = await service.until(honest, Phase.RUNNING)
        host = began.slots[0].node
        beside = await service.submit(2)
        await service.until(beside, Phase.RUNNING)
        liar = next(node for node in NODES if node != host)
        rounds = 0
        asking = asyncio.create_task(_ask(backend, liar, honest))
        while True:
            rounds += 1
            backend.lie(liar, order.choice((0.3, 0.7, 1.0)), order.choice((5, 20, 60)))
            await asyncio.sleep(order.uniform(0.2, 3.0))
            await service.read_pages()
            was, asked = (await beside.state()).phase, time.monotonic()
            ended = await service.cancel(beside)
            took = time.monotonic() - asked
            say(
                f"round {rounds}: {backend.count_lies(liar)} lies; it was {was} and {ended} "
                f"{took:.1f} s after the cancel"
            )
            if backend.count_lies(liar) >= messages:
                break
            if is_given := order.random() < 0.6:
                backend.be_honest(liar)
            beside = await service.submit(2)
            if is_given:
                await service.until_given(beside, liar)
        if not service.has_named(liar):
            # Each lie may have been told to what only asks, or just before a cancel. A job whose
            # watch hears nothing but lies must say so, unless the fleet withholds the liar.
            backend.be_honest(liar)
            beside = await service.submit(2)
            await service.until_given(beside, liar)
            if (await beside.state()).phase is Phase.RUNNING:
                backend.lie(liar, 1.0, 20)
                await service.until_named(liar)
            assert service.has_named(liar) or service.out_of_service
            await service.cancel(beside)
        assert not asking.done(), asking.exception()
        asking.cancel()
        told = backend.count_lies(liar)
        await service.read_pages()
        backend.be_honest(liar)
        now = await service.until(honest, Phase.RUNNING)
        assert (now.generation, now.incidents, now.incident) == (1, (), None), (
            f"the job on {host} was harmed: {now.reason}"
        )
        assert await service.cancel(honest) is Phase.CANCELLED
        # The liar may be out of service by now: the fleet goes on with the other two.
        await service.until(await service.submit(2), Phase.RUNNING)
        ids = [*(job.handle.id for job in service.rig.jobs), service.rig.fleet.id]
        failed = [why for id_ in ids for why in await _failures(service.rig, id_)]
        assert not failed, "\n".join(failed)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    assert grown < MAX_MEMORY_KIB, f"memory grew by {grown >> 10} MiB"
    return (
        f"seed {seed}: {told} lies in {rounds} rounds, "
        f"{service.cancelled} jobs cancelled beside it, "
        f"{len(service.sentences)} sentences of it, memory +{grown >> 10} MiB; "
        f"out of service: {service.out_of_service or 'no'}"
    )


async def _ask(backend: HostileBackend, liar: str, job: Job) -> None:
    """Ask the liar what people and repairs ask of a node.

    Whatever it answers is an answer, or a `BackendError`.
    """
    state = await job.state()
    while True:
        for ask in (
            lambda: backend.list(liar),
            lambda: backend.probe(liar, 2.0, None),
            lambda: backend.logs(liar, state.token, None, 65536, 0.0, 10),
            lambda: backend.stacks(liar, state.token, 0),
            lambda: backend.last_words(liar, state.token),
        ):
            with contextlib.suppress(BackendError):
                await ask()
            await asyncio.sleep(0.05)


async def _failures(rig: Rig, id_: str) -> list[str]:
    """Why workflow tasks of a workflow failed, but for those that ended it in the moment in which a
    message arrived: the server has them repeated with the message."""
    history = await rig.client.get_workflow_handle(id_).fetch_history()
    failed = [
        event.workflow_task_failed_event_attributes
        for event in history.events
        if event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED
        and event.workflow_task_failed_event_attributes.cause != UNHANDLED_COMMAND
    ]
    return [f"{id_}: {one.cause} {read_failure(one.failure)}" for one in failed]
