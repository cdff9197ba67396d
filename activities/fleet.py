"""Activities of the fleet workflow.

They read its file, look at its nodes, find running jobs, and stop ranks whose workflow has ended.
The module also has `tell_fleet`, by which all other components signal a fleet: it starts the
fleet's workflow if there is none.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError
from pydantic_core import to_json
from temporalio import activity
from temporalio.client import (
    Client,
    WorkflowExecution,
    WorkflowExecutionDescription,
    WorkflowExecutionStatus,
    WorkflowHandle,
    WorkflowQueryFailedError,
    WorkflowQueryRejectedError,
)
from temporalio.common import Priority, RawValue, WorkflowIDConflictPolicy
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from relaunch.activities.clocks import read_boot_clock
from relaunch.activities.launch import MAX_CONCURRENT_CALLS, MAX_GENERATIONS_AHEAD
from relaunch.activities.readings import Listing, NodeReader, NodeSnapshot, list_node
from relaunch.activities.stop import StopRanksInput, send_heartbeats, stop_everywhere
from relaunch.backends.base import Backend, Fleets, identity
from relaunch.evidence.catalog import catalog
from relaunch.evidence.health import read_condition
from relaunch.generation import Token
from relaunch.messages.fleets import (
    FleetFile,
    FleetInput,
    FleetNews,
    ReadFleetInput,
    WatchFleetInput,
)
from relaunch.messages.ids import FLEET_ID_PREFIX, FLEET_PRIORITY, WORKFLOW_ID_PREFIX
from relaunch.messages.seals import PLAIN_RESULT
from relaunch.pool.events import FleetFileContent, PreviousRun
from relaunch.pool.inventory import Inventory, read_inventory
from relaunch.pool.messages import Claim
from relaunch.pool.nodes import INVENTORY_INTERVAL, MAX_INVENTORIES
from relaunch.pool.restore import export_state, has_restored
from relaunch.pool.rounds import is_news
from relaunch.pool.state import FleetState, LiveGeneration, NodeProbe, WarmPython
from relaunch.spec.fleet import FleetSpec
from relaunch.spec.policy import Timeouts

Answer = TypeVar("Answer")
TASK_TIMEOUT = timedelta(seconds=10)
"""Timeout of the fleet's workflow tasks. A worker that has just started replays looks at thousands
of nodes before it can answer."""
RETRY_INTERVAL_S = 2.0
"""Seconds between two attempts to stop ranks on nodes that did not answer."""
GIVE_BACK_DELAY = timedelta(seconds=5)
"""How long nodes that are proven clean wait for those that do not answer, before they are given
back without them."""
RECLAIM_TIMEOUT = timedelta(minutes=5)
"""When an attempt ends that got no node back. The next one begins with what is known by then."""
MAX_DESCRIBE_CALLS = 16
"""Most describe calls at once. More would be a burst on a server that has other work."""
RESTORE_TIMEOUT = timedelta(seconds=10)
"""Time limit for asking ended runs for their state. A worker replays a long run in a second or
two."""
LIST_INTERVAL_S = 0.1
"""Seconds between two listings. A server lists a new run within a second."""
MAX_RUNS = 8
"""Most earlier runs that are asked. Each of them ended before it had restored the state of the runs
before it."""
MAX_LISTED = 1000
"""Most runs that are looked through for these: those that continued as new are not asked."""
MAX_REPORTED = 2048
"""Probes that one round reports: half a megabyte of JSON."""
FLEET_UNKNOWN = "FleetUnknown"
LEN_OF_UUID = 36
MAX_JOBS_TO_DESCRIBE = 16
"""Up to this many jobs it is cheaper to describe each one than to list all running jobs."""


class FleetFiles(Fleets, Protocol):
    def reload(self, fleet: str) -> FleetSpec:
        """Read the fleet file again.

        Raises:
            KeyError: this worker has no such fleet.
            ValueError: the file cannot be used; the fleet is served as before.
        """
        ...


@dataclass(frozen=True, slots=True)
class LookInput:
    fleet: str
    nodes: tuple[str, ...]
    read: tuple[str, ...] = ()
    """The nodes whose GPUs are read, too."""


@dataclass(frozen=True, slots=True)
class ClosedJobsInput:
    fleet: str
    claims: tuple[tuple[str, int], ...]
    """(job, submission)."""


@dataclass(frozen=True, slots=True)
class ReclaimInput:
    fleet: str
    job: str
    submission: int
    nodes: tuple[str, ...]
    generation: int | None = None
    """Stop nothing above this generation of the submission, which still runs elsewhere. None: it
    has ended."""

    def includes(self, token: Token) -> bool:
        """Return whether a launch is to be stopped."""
        if self.generation is None:
            return token.submission <= self.submission
        return (token.submission, token.generation) <= (self.submission, self.generation)


@dataclass(frozen=True, slots=True)
class TellFleetInput:
    fleet: str
    signal: str
    message: Any


@dataclass(frozen=True, slots=True)
class CountFreeInput:
    fleet: str
    claim: Claim
    """It avoids the job's own nodes. It is not sent to the fleet as a claim."""


class FleetActivities:
    def __init__(
        self,
        fleets: FleetFiles,
        client: Client,
        task_queue: str,
        note_round: Callable[[str], None] = lambda fleet: None,
    ) -> None:
        """Create the activities.

        Args:
            fleets: The fleets of this worker.
            client: The client of the server.
            task_queue: Where fleets are started.
            note_round: Is called with a fleet's name each time its nodes were probed for it.
        """
        self._fleets = fleets
        self._client = client
        self._task_queue = task_queue
        self._note_round = note_round
        self._reader = NodeReader()
        self._clock = read_boot_clock

    @activity.defn
    async def read_fleet(self, input: ReadFleetInput) -> FleetFile:
        wrong = ""
        try:
            spec = self._fleets.reload(input.fleet)
        except KeyError as error:
            return FleetFile(None, str(error.args[0]))
        except ValueError as error:
            wrong = str(error.args[0])
            if input.digest:
                return FleetFile(None, wrong)
            # A fleet that has read no file yet would tell its jobs that it has no nodes.
            spec = self._fleets.spec(input.fleet)
        # Copy the fleet's user and port into each node, so that a change of either counts as a
        # change of the node.
        how = {"user": spec.ssh.user, "port": spec.ssh.port}
        nodes = (
            node.model_copy(
                update={name: getattr(node, name) or value for name, value in how.items()}
            )
            for node in spec.nodes
        )
        content = FleetFileContent(spec.repairs, tuple(nodes), spec.limits, access=spec.access)
        digest = hashlib.sha256(to_json(content)).hexdigest()
        return FleetFile(content if digest != input.digest else None, wrong, digest)

    @activity.defn
    async def read_last_state(self, fleet: str) -> PreviousRun:
        """Return the state of the fleet before this run of its workflow.

        It is empty if there was no earlier run; if the earlier state cannot be read any more,
        `lost` says why.
        """
        known: list[FleetState] = []
        lost = ""
        asked = 0
        # A run that continued as new handed on what it knew, first of all to the one that asks.
        has_next_begun = True
        try:
            async with asyncio.timeout(RESTORE_TIMEOUT.total_seconds()):
                for run in await self._runs_before(fleet):
                    if has_next_begun and run.status is WorkflowExecutionStatus.CONTINUED_AS_NEW:
                        continue
                    if asked == MAX_RUNS:
                        lost = (
                            f"none of the {asked} runs before this one had restored the state"
                            " of its predecessor"
                        )
                        break
                    asked += 1
                    state = await self._state_of(run)
                    has_next_begun = state is not None
                    if state is not None:
                        known.append(state)
                        if has_restored(state):
                            break
        except (
            RPCError,
            WorkflowQueryFailedError,
            WorkflowQueryRejectedError,
            ValidationError,
            LookupError,
            TimeoutError,
        ) as error:
            lost = str(error.args[0] if isinstance(error, LookupError) else error) or "no answer"
            activity.logger.warning(
                "fleet %s: the state of the previous run cannot be read: %s", fleet, lost
            )
        found = export_state(*known) if known else PreviousRun()
        return replace(found, lost=lost)

    async def _runs_before(self, fleet: str) -> list[WorkflowExecution]:
        """Return the ended runs of the fleet, newest first."""
        query, own = f"WorkflowId = '{FLEET_ID_PREFIX}{fleet}'", activity.info().workflow_run_id
        while True:
            listing = [run async for run in self._client.list_workflows(query, limit=MAX_LISTED)]
            # The list may be some seconds old. If it contains the calling run, it also contains the
            # runs before it, which have all ended.
            if any(run.run_id == own for run in listing):
                return sorted(
                    (run for run in listing if run.run_id != own),
                    key=lambda run: run.start_time,
                    reverse=True,
                )
            await asyncio.sleep(LIST_INTERVAL_S)

    async def _state_of(self, run: WorkflowExecution) -> FleetState | None:
        """Query an ended run, which a worker replays for that.

        None: it ended before a worker had processed it.

        Raises:
            LookupError: it belongs to another task queue, so no worker here can replay it, or a
                worker without the keys answered.
        """
        from relaunch.encryption import has_proof  # not for workflows, which import this module

        if run.task_queue != activity.info().task_queue:
            raise LookupError(f"run {run.run_id} was of workers on task queue {run.task_queue}")
        handle = self._client.get_workflow_handle(run.id, run_id=run.run_id)
        try:
            read: RawValue = await handle.query(
                "state", result_type=RawValue, rpc_timeout=RESTORE_TIMEOUT
            )
        except RPCError as error:
            if error.status is not RPCStatusCode.FAILED_PRECONDITION:
                raise
            return None
        if not has_proof(self._client, read.payload):
            raise LookupError(f"run {run.run_id}: {PLAIN_RESULT}")
        converter = self._client.data_converter.payload_converter
        state: FleetState = converter.from_payload(read.payload, FleetState)
        return state

    @activity.defn
    async def count_free_nodes(self, input: CountFreeInput) -> int:
        """Return how many free nodes the fleet could give the job beside those that it avoids.

        Raises:
            ApplicationError: the fleet's workflow does not run, or no worker answers for it.
        """
        handle = self._client.get_workflow_handle(f"{FLEET_ID_PREFIX}{input.fleet}")
        try:
            count: int = await handle.query(
                "count_free", input.claim, result_type=int, rpc_timeout=RESTORE_TIMEOUT
            )
        except (RPCError, WorkflowQueryFailedError, WorkflowQueryRejectedError) as error:
            raise ApplicationError(
                f"fleet {input.fleet} does not say which nodes are free: {error}"
            ) from error
        return count

    @activity.defn
    async def probe_nodes(self, input: LookInput) -> tuple[NodeProbe, ...]:
        """Ask each node once. A node that does not answer is reported as silent."""
        async with send_heartbeats() as shown:
            shown.append({"looking at": list(input.nodes[:8]), "nodes": len(input.nodes)})
            probes = await self._probe(input)
        if activity.info().workflow_id is None:  # a person asked
            return probes
        self._note_round(input.fleet)
        return tuple(replace(probe, warm=()) for probe in probes)

    async def _probe(self, input: LookInput) -> tuple[NodeProbe, ...]:
        backend = self._fleets.backend(input.fleet)
        seen = await self._read_nodes(backend, input)
        mine = identity(self._client.namespace, input.fleet, backend.server)
        gone = NodeSnapshot(f"fleet file {input.fleet} of this worker does not name it")
        unused = {node: backend.node(node).unused_ports for node in seen if seen[node].was_read}
        return tuple(
            _build_probe(node, seen.get(node, gone), mine, unused.get(node, ()))
            for node in input.nodes
        )

    async def _read_nodes(self, backend: Backend, input: LookInput) -> dict[str, NodeSnapshot]:
        read = frozenset(input.read)

        async def read_node(node: str) -> NodeSnapshot:
            return (
                await self._reader.take_snapshot(backend, input.fleet, node)
                if node in read
                else NodeSnapshot(await list_node(backend, node))
            )

        return await _ask_each(self._select_members(input.fleet, input.nodes), read_node)

    @activity.defn
    async def find_jobs(self, fleet: str) -> tuple[str, ...]:
        """Return the running jobs of this fleet.

        A job whose fleet is not known is included: it is asked, and may answer or not.
        """
        async with send_heartbeats():
            listing = sorted([job async for job in self._list_running_jobs(fleet)])
            # The list may be some seconds old, and waiting for a job that has ended would be
            # useless.
            running = await self._read_submissions(listing)
        return tuple(job for job in listing if running[job] is not None)

    @activity.defn
    async def find_closed_jobs(self, input: ClosedJobsInput) -> tuple[tuple[str, int], ...]:
        """Return which of these submissions no longer run."""
        async with send_heartbeats():
            return await self._find_closed(input.fleet, input.claims)

    async def _find_closed(
        self, fleet: str, claims: tuple[tuple[str, int], ...]
    ) -> tuple[tuple[str, int], ...]:
        if len(claims) > MAX_JOBS_TO_DESCRIBE:
            listing = frozenset([job async for job in self._list_running_jobs(fleet)])
            # Absence from a list that may be some seconds old proves nothing yet.
            claims = tuple(claim for claim in claims if claim[0] not in listing)
        running = await self._read_submissions([job for job, _ in claims])
        return tuple(
            (job, submission)
            for job, submission in claims
            if (runs := running[job]) is None or runs > submission
        )

    @activity.defn
    async def watch_fleet(self, input: WatchFleetInput) -> FleetNews:
        """Read the fleet file, ask which jobs have ended and probe all nodes, round after round,
        until a round finds something that the fleet did not know.

        Raises:
            ApplicationError: this worker shuts down; the next one goes on.
        """
        read_at = self._clock() + input.first_in.total_seconds()
        due = {
            node.node: self._clock() + node.read_in
            for node in input.nodes
            if node.read_in is not None
        }
        pending: frozenset[str] = frozenset()
        async with send_heartbeats() as shown:
            while True:
                await _sleep_unless_shut_down(read_at - self._clock())
                read_at = self._clock() + input.interval.total_seconds()
                file = await self.read_fleet(ReadFleetInput(input.fleet, input.file_digest))
                is_file_news = file.applied is not None or file.wrong != input.file_wrong
                closed = await self._find_closed(input.fleet, input.claims)
                probes = await self._probe_round(input, due)
                self._note_round(input.fleet)
                known = {node.node: node for node in input.nodes}
                news = [
                    probe
                    for probe in probes
                    if is_news(known[probe.node], probe, was_pending=probe.node in pending)
                ]
                if is_file_news or closed or news:
                    # What is left out is found again by the next watch.
                    return FleetNews(
                        file if is_file_news else None, closed, tuple(news[:MAX_REPORTED])
                    )
                pending = frozenset(probe.node for probe in probes if probe.inventory_pending)
                due.update(dict.fromkeys(pending, read_at))
                shown[:] = [
                    {
                        "last round": datetime.now(UTC).isoformat(timespec="seconds"),
                        "nodes": len(probes),
                        "silent": sum(bool(probe.silent) for probe in probes),
                    }
                ]

    async def _probe_round(
        self, input: WatchFleetInput, due: dict[str, float]
    ) -> tuple[NodeProbe, ...]:
        """Probe all nodes once, and read the GPUs of those for which that is due.

        Args:
            input: What the fleet knows.
            due: When each node's GPUs are to be read, by this worker's clock. It is updated.
        """
        now = self._clock()
        overdue = sorted((at, node) for node, at in due.items() if at <= now)
        read = tuple(node for _, node in overdue[:MAX_INVENTORIES])
        due.update(dict.fromkeys(read, now + INVENTORY_INTERVAL.total_seconds()))
        probes = await self._probe(
            LookInput(input.fleet, tuple(node.node for node in input.nodes), read)
        )
        return tuple(replace(probe, warm=()) for probe in probes)

    @activity.defn
    async def reclaim(self, input: ReclaimInput) -> tuple[str, ...]:
        """Stop the remaining ranks of a submission whose workflow has ended, or which are where
        it has no nodes.

        Return the nodes that are proven clean, as soon as there are some.

        Nodes that do not answer are asked again: only the job's own policy said how long their
        ranks may go on by themselves, and a silent node could not be used meanwhile anyway.
        """
        backend = self._fleets.backend(input.fleet)
        clean: list[str] = []
        ends = datetime.now(UTC) + RECLAIM_TIMEOUT
        async with send_heartbeats() as shown:
            while True:
                left = tuple(node for node in input.nodes if node not in clean)
                shown[:] = [{"waiting for": list(left[:8]), "nodes": len(left)}]
                # While the submission runs, its workflow manages the ranks on its nodes.
                if (
                    input.generation is not None
                    or await self._read_submission(input.job) != input.submission
                ):
                    proven = await self._stop_left(backend, input, left)
                    if proven and not clean:
                        ends = min(ends, datetime.now(UTC) + GIVE_BACK_DELAY)
                    clean += proven
                if len(clean) == len(input.nodes) or datetime.now(UTC) >= ends:
                    return tuple(node for node in input.nodes if node in clean)
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def _stop_left(
        self, backend: Backend, input: ReclaimInput, nodes: tuple[str, ...]
    ) -> list[str]:
        """Try once to stop the submission on nodes; return those on which it is proven gone."""
        listing = await _ask_each(
            self._select_members(input.fleet, nodes), lambda node: list_node(backend, node)
        )
        answering = tuple(node for node, found in listing.items() if not isinstance(found, str))
        mine = (backend.server, self._client.namespace, input.job)
        own = identity(self._client.namespace, input.fleet, backend.server)
        known = {
            node: _list_tokens(found, mine, own)
            for node, found in listing.items()
            if not isinstance(found, str)
        }
        # On nodes where another fleet has launched this job, too, only generations below that
        # launch may be stopped.
        shared = {node for node in answering if _has_foreign(listing[node], mine, own)}
        # A generation number that only one node reports must stop nothing on the others.
        shared.update(_find_outliers({node: max(found) for node, found in known.items() if found}))
        clean: list[str] = []
        for together in (
            tuple(node for node in answering if node not in shared),
            *((node,) for node in answering if node in shared),
        ):
            tokens = [token for node in together for token in known[node] if input.includes(token)]
            if not tokens:
                # Nothing was ever prepared there. A leftover launcher starts nothing: the server no
                # longer acknowledges its heartbeats.
                clean += together
                continue
            order = StopRanksInput(
                max(tokens),
                input.fleet,
                together,
                Timeouts(),
                len(input.nodes),
                fences=False,
                once=True,
            )
            clean += (await stop_everywhere(backend, order)).nodes
        return clean

    @activity.defn
    async def tell_fleet(self, input: TellFleetInput) -> None:
        """Send a signal to a fleet. The first signal starts the fleet's workflow.

        Raises:
            ApplicationError: no fleet file of this worker has that name; its type is FLEET_UNKNOWN,
                and it is not retried.
        """
        try:
            self._fleets.spec(input.fleet)
        except KeyError as error:
            raise ApplicationError(
                str(error.args[0]), type=FLEET_UNKNOWN, non_retryable=True
            ) from None
        await self._client.start_workflow(
            "Fleet",
            FleetInput(input.fleet),
            id=f"{FLEET_ID_PREFIX}{input.fleet}",
            task_queue=self._task_queue,
            task_timeout=TASK_TIMEOUT,
            priority=Priority(priority_key=FLEET_PRIORITY),
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            start_signal=input.signal,
            start_signal_args=[input.message],
            static_summary=f"fleet {input.fleet}: who gets which nodes, and what is repaired"[:200],
        )

    def _select_members(self, fleet: str, nodes: Sequence[str]) -> list[str]:
        names = {node.name for node in self._fleets.spec(fleet).nodes}
        return [node for node in nodes if node in names]

    async def _list_running_jobs(self, fleet: str) -> AsyncIterator[str]:
        async for execution in self._client.list_workflows(
            "WorkflowType = 'TrainingJob' AND ExecutionStatus = 'Running'"
        ):
            if await _fleet_of(execution) in ("", fleet):
                yield execution.id.removeprefix(WORKFLOW_ID_PREFIX)

    async def _read_submissions(self, jobs: Sequence[str]) -> dict[str, int | None]:
        gate = asyncio.Semaphore(MAX_DESCRIBE_CALLS)

        async def one(job: str) -> int | None:
            async with gate:
                return await self._read_submission(job)

        return dict(zip(jobs, await asyncio.gather(*(one(job) for job in jobs)), strict=True))

    async def _read_submission(self, job: str) -> int | None:
        """Return the submission of a job that runs; None: none runs.

        A submission is numbered by the start time of its first run, or higher if the server's clock
        was set back since the previous one; the memo holds the number.
        """
        handle = self._client.get_workflow_handle(f"{WORKFLOW_ID_PREFIX}{job}")
        run = await _describe(handle)
        if run is None or run.status is not WorkflowExecutionStatus.RUNNING:
            return None
        if number := (await run.memo()).get("submission"):
            return int(number)
        first = run.raw_description.workflow_execution_info.first_run_id
        if first and first != run.run_id:
            run = await _describe(self._client.get_workflow_handle(handle.id, run_id=first))
        if run is None:  # the first run is past the server's retention
            return int((await handle.query("state"))["submission"])
        return int(run.start_time.timestamp() * 1000)


async def _sleep_unless_shut_down(seconds: float) -> None:
    """Sleep.

    Raises:
        ApplicationError: this worker shuts down meanwhile.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, seconds)):
            await activity.wait_for_worker_shutdown()
            raise ApplicationError(
                "this worker shuts down",
                type="HandOver",
                next_retry_delay=timedelta(milliseconds=1),
            )


async def _describe(handle: WorkflowHandle[Any, Any]) -> WorkflowExecutionDescription | None:
    try:
        return await handle.describe()
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return None
        raise


async def _fleet_of(execution: WorkflowExecution) -> str:
    """Return the fleet that a job's memo names; empty if it names none."""
    return str((await execution.memo()).get("fleet", ""))


async def _ask_each(
    nodes: Sequence[str], question: Callable[[str], Awaitable[Answer]]
) -> dict[str, Answer]:
    gate = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

    async def one(node: str) -> Answer:
        async with gate:
            return await question(node)

    return dict(zip(nodes, await asyncio.gather(*(one(node) for node in nodes)), strict=True))


def _build_probe(
    node: str, seen: NodeSnapshot, mine: str, unused_ports: Sequence[str]
) -> NodeProbe:
    listing = seen.listing
    if isinstance(listing, str):
        return NodeProbe(node, silent=listing or "no answer")
    ours: dict[LiveGeneration, None] = {}
    others: dict[str, None] = {}
    for job in listing.get("jobs", ()):
        for generation in job.get("generations", ()):
            if not any(rank.get("alive") for rank in generation.get("ranks", ())):
                continue
            # Ranks of another fleet are not this fleet's to stop, but they still make the node
            # unusable.
            server, _, namespace = mine.rpartition("/")[0].rpartition("/")
            if job.get("server") not in (None, server):
                others[f"job {job['job']} of another Temporal server runs on it"] = None
            elif job["namespace"] != namespace:
                others[f"job {job['job']} of namespace {job['namespace']} runs on it"] = None
            elif _is_foreign(generation, mine):
                fleet = str(generation["fleet"]).rpartition("/")[2]
                others[f"ranks of job {job['job']} of fleet {fleet} live on it"] = None
            else:
                ours[
                    LiveGeneration(job["job"], generation["submission"], generation["generation"])
                ] = None
    held = listing.get("held")
    by = (
        f"{held.get('by', 'another user')} ({held.get('id', 'unknown')}) works on it"
        if held is not None
        else ""
    )
    living = sorted(ours, key=lambda one: (one.job, one.submission, one.generation))
    return NodeProbe(
        node,
        boot_id=_shorten_boot_id(str(listing.get("boot_id") or "")),
        busy=by or next(iter(others), ""),
        generations=tuple(living),
        inventory=_build_inventory(seen.reading, unused_ports) if seen.was_read else None,
        inventory_age=seen.age,
        inventory_pending=seen.unread,
        warm=tuple(
            WarmPython(row["job"], tuple(row["modules"]), row["state"], row["bytes"])
            for row in listing.get("warm", ())
        ),
    )


def _build_inventory(reading: Mapping[str, Any], unused_ports: Sequence[str]) -> Inventory:
    found = read_condition({**reading, "unused_ports": list(unused_ports)}, catalog())
    return read_inventory(reading.get("gpus"), found.fault, found.reset_wanted)


def _shorten_boot_id(boot_id: str) -> str:
    """Return the first eight digits of a kernel's boot id, which people can compare; those of nodes
    that share a machine differ only at their end. A fleet keeps one for each of its nodes."""
    return boot_id[:8] if len(boot_id) == LEN_OF_UUID else boot_id


def _is_foreign(generation: Mapping[str, Any], mine: str) -> bool:
    """Return whether another fleet launched the generation.

    A generation that names no fleet was launched by a version that did not send the fleet, and
    belongs to the fleet of its job.
    """
    return generation.get("fleet") not in (None, "", mine)


def _has_foreign(listing: Listing, mine: tuple[str, str, str], fleet: str) -> bool:
    if isinstance(listing, str):
        return False
    jobs = [job for job in listing.get("jobs", ()) if _job_key(job, mine[0]) == mine]
    return any(_is_foreign(one, fleet) for job in jobs for one in job.get("generations", ()))


def _find_outliers(newest: Mapping[str, Token]) -> tuple[str, ...]:
    """Return the nodes whose newest token of a job is too far ahead of the others'.

    Too far is further than relaunches can explain.
    """
    tokens = sorted(newest.values())
    if not tokens:
        return ()
    most = tokens[(len(tokens) - 1) // 2].generation + MAX_GENERATIONS_AHEAD
    return tuple(node for node, token in newest.items() if token.generation > most)


def _job_key(job: Mapping[str, Any], server: str) -> tuple[Any, Any, Any]:
    """Return the key of a job that a node lists.

    A job that names no server is identified by the fleets of its generations.
    """
    return job.get("server", server), job.get("namespace"), job.get("job")


def _list_tokens(listing: Mapping[str, Any], mine: tuple[str, str, str], fleet: str) -> list[Token]:
    """Return every launch of a job by this fleet that a node knows, even if only prepared."""
    found: list[Token] = []
    for job in listing.get("jobs", ()):
        if _job_key(job, mine[0]) != mine:
            continue
        generations = job.get("generations", ())
        others = [
            (one["submission"], one["generation"]) for one in generations if _is_foreign(one, fleet)
        ]
        numbers = [(one["submission"], one["generation"]) for one in generations]
        if job.get("prepared"):
            numbers.append((job["prepared"][0], job["prepared"][1]))
        if others:
            # Stopping a generation stops all generations below it.
            numbers = [one for one in numbers if one < min(others)]
        found += [Token(*mine[1:], submission, generation) for submission, generation in numbers]
    return found
