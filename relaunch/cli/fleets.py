"""Reads the state of fleets and sends them requests from people.

Every refusal raises `ConfigError` with a one-sentence message and sends nothing. The first request
starts the fleet's workflow, unless the worker has no fleet file of that name.
"""

from __future__ import annotations

import asyncio
import difflib
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from temporalio.client import (
    ActivityFailureError,
    Client,
    WorkflowExecutionStatus,
    WorkflowQueryFailedError,
    WorkflowQueryRejectedError,
)
from temporalio.common import Priority, RetryPolicy, WorkflowIDConflictPolicy
from temporalio.exceptions import TimeoutError as ActivityTimeout
from temporalio.service import RPCError, RPCStatusCode

from relaunch.access.orders import REFUSED
from relaunch.cli.client import whoami
from relaunch.cli.job_views import names
from relaunch.cli.jobs import (
    ACTIVITY_TIMEOUT,
    QUERY_TIMEOUT,
    JobSnapshot,
    list_jobs,
    load_job,
    signal_open,
)
from relaunch.cli.sign import sign_message
from relaunch.cli.terminal import check_name
from relaunch.config import ConfigError
from relaunch.evidence.fields import text
from relaunch.messages.fleets import FleetFile, FleetInput, ReadFleetInput
from relaunch.messages.ids import FLEET_ID_PREFIX, FLEET_PRIORITY
from relaunch.messages.jobs import ReportMessage
from relaunch.pool.events import FleetFileContent
from relaunch.pool.state import FleetState, NodeProbe, NodeRecord, NodeStatus, WarmPython

WORKFLOW = "Fleet"
TASK_TIMEOUT = timedelta(seconds=10)
"""The same as everywhere a fleet is started: a worker that has just started reads thousands of
probe results before it can answer."""
READ_TIMEOUT = timedelta(seconds=10)
"""Timeout for a worker to start the activity and read a file: milliseconds, but a worker that `up`
has just started needs some seconds."""
CHECK_TIMEOUT = timedelta(seconds=2)
"""Timeout for the same before a job is submitted: where no worker answers, the job can wait."""
PROBES_TIMEOUT_S = 15.0
"""Seconds from a fleet's start until all its nodes are probed: a worker gives up earlier on a node
that does not answer, and a slow one has ten."""
EFFECT_TIMEOUT = 10.0
"""Seconds: a signal, a workflow task and an activity take well under one; a fleet of 2,048 nodes
settles in 0.2."""
BUSY_TIMEOUT_S = 20.0
"""Seconds to wait for a worker that asks the server for work, and does not answer yet: it has just
started, or its machine is busy."""
MAX_CONCURRENT_READS = 16
WARM_TIMEOUT = timedelta(seconds=3)
"""Timeout for a worker to ask a node that answers what imports ahead there: not worth a wait."""
PROBE_TIMEOUT = timedelta(seconds=40)
"""Timeout for a worker to probe a node that may not answer."""
MAX_BY_LENGTH = 80
"""Length in characters to which a fleet truncates a person's name."""
POLL_INTERVAL_S = 0.2
"""Seconds between queries: the state of a large fleet is a megabyte."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a request to a fleet."""

    fleet: FleetState
    shown: bool
    news: tuple[str, ...] = ()
    """Notices that the fleet has added since: if it did not accept the request, they say why."""


async def read(client: Client, task_queue: str, fleet: str) -> FleetState:
    """Return the state of a fleet; start the fleet and wait for its first probes if it does not
    run.

    Raises:
        ConfigError: No worker answers, or it has no such fleet.
    """
    check_name("fleet", fleet)
    if not await _runs(client, fleet):
        await read_file(client, task_queue, fleet)
        await client.start_workflow(
            WORKFLOW,
            FleetInput(fleet),
            id=f"{FLEET_ID_PREFIX}{fleet}",
            task_queue=task_queue,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            task_timeout=TASK_TIMEOUT,
            priority=Priority(priority_key=FLEET_PRIORITY),
            static_summary=f"fleet {fleet}: assigns nodes to jobs and orders repairs"[:200],
        )
    state, _ = await _wait_until(client, fleet, _has_looked, PROBES_TIMEOUT_S)
    if not state.is_file_read:  # a worker answers, so it is busy
        state, _ = await _wait_until(client, fleet, lambda now: now.is_file_read, BUSY_TIMEOUT_S)
    if not state.nodes:
        await read_file(client, task_queue, fleet)  # raises if there is no such file
        raise ConfigError(
            f"fleet {fleet} has no nodes yet: "
            f"{names(list(state.notices[-1:])) or 'it has just started'}; repeat the command"
        )
    return state


async def _runs(client: Client, fleet: str) -> bool:
    try:
        described = await client.get_workflow_handle(f"{FLEET_ID_PREFIX}{fleet}").describe()
    except RPCError as error:
        if error.status != RPCStatusCode.NOT_FOUND:
            raise
        return False
    return described.status == WorkflowExecutionStatus.RUNNING


def _has_looked(state: FleetState) -> bool:
    return state.is_file_read and all(node.probe is not None for node in state.nodes)


async def _query(client: Client, fleet: str, within: float | None = None) -> FleetState:
    """Return the state of a fleet.

    Args:
        client: Of the server.
        fleet: Its name.
        within: Seconds to wait for a worker that is busy; None: `BUSY_TIMEOUT_S`.

    Raises:
        ConfigError: No worker answers, or the state cannot be read.
    """
    handle = client.get_workflow_handle(f"{FLEET_ID_PREFIX}{fleet}")
    began = time.monotonic()
    while True:
        try:
            state: FleetState = await handle.query(
                "state", result_type=FleetState, rpc_timeout=QUERY_TIMEOUT
            )
        except (WorkflowQueryFailedError, WorkflowQueryRejectedError) as error:
            raise ConfigError(
                f"the state of fleet {fleet} cannot be read: {error}; see "
                f"{FLEET_ID_PREFIX}{fleet} in the web UI"
            ) from None
        except RPCError as error:
            if error.status == RPCStatusCode.FAILED_PRECONDITION:  # the server knows of no worker
                raise _no_worker(fleet) from None
            if error.status not in (RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED):
                raise
            task_queue = (await handle.describe()).task_queue
            await _check_worker(client, task_queue, fleet, began, within)
        else:
            return state


async def _check_worker(
    client: Client, task_queue: str, fleet: str, began: float, within: float | None
) -> None:
    """Refuse to go on waiting for a worker where there is none, or for too long.

    Raises:
        ConfigError: None asks for work, or one does and has not answered.
    """
    from relaunch.cli.worker_status import list_pollers

    limit = BUSY_TIMEOUT_S if within is None else within
    if not await list_pollers(client, task_queue):
        raise _no_worker(fleet)
    if time.monotonic() - began >= limit:
        raise ConfigError(
            f"no worker answers for fleet {fleet}: one asked for work less than two minutes ago, "
            "so it is busy or has ended since: start one (`relaunch up` or `relaunch-worker`) if "
            "it has, then repeat the command"
        )


def _no_worker(fleet: str) -> ConfigError:
    return ConfigError(
        f"no worker answers for fleet {fleet}: start one (`relaunch up` or `relaunch-worker`), "
        "then repeat the command"
    )


async def _wait_until(
    client: Client, fleet: str, met: Callable[[FleetState], bool], within: float
) -> tuple[FleetState, bool]:
    deadline = time.monotonic() + within
    while not met(state := await _query(client, fleet)):
        if time.monotonic() > deadline:
            return state, False
        await asyncio.sleep(POLL_INTERVAL_S)
    return state, True


async def read_file(client: Client, task_queue: str, fleet: str) -> FleetFileContent:
    """Return the fleet file as a worker has it.

    Raises:
        ConfigError: No worker answers, or it has no such file.
    """
    began = time.monotonic()
    while True:
        try:
            file = await _ask_for_file(client, task_queue, fleet, READ_TIMEOUT)
        except ActivityFailureError as error:
            if not isinstance(error.cause, ActivityTimeout):
                raise ConfigError(
                    f"the file of fleet {fleet} cannot be read: {error.cause or error}"
                ) from None
            await _check_worker(client, task_queue, fleet, began, None)
        else:
            break
    if file.applied is None:
        raise ConfigError(file.wrong)
    return file.applied


async def _ask_for_file(
    client: Client, task_queue: str, fleet: str, within: timedelta
) -> FleetFile:
    file: FleetFile = await client.execute_activity(
        "read_fleet",
        ReadFleetInput(check_name("fleet", fleet)),
        id=f"read_fleet/{fleet}/{uuid.uuid4().hex}",
        task_queue=task_queue,
        result_type=FleetFile,
        schedule_to_close_timeout=within,
        retry_policy=RetryPolicy(maximum_attempts=1),
        summary=f"the file of fleet {fleet}, for {whoami()}",
    )
    return file


def node_of(fleet: FleetState, name: str) -> NodeRecord:
    """Return the record of a node.

    Raises:
        ConfigError: The fleet has no node of that name.
    """
    check_name("node", name)
    for record in fleet.nodes:
        if record.name == name:
            return record
    known = [record.name for record in fleet.nodes]
    near = difflib.get_close_matches(name, known, n=3) or known
    raise ConfigError(
        f"node {name!r} is not in fleet {fleet.name}: expected "
        f"{'one of ' if len(near) > 1 else ''}{names(near)}"
    )


async def check_fleet(client: Client, task_queue: str, fleet: str) -> None:
    """Refuse a fleet that no worker serves; do nothing if it runs, or if no worker answers.

    Raises:
        ConfigError: A worker answers and has no such fleet, or cannot use its file.
    """
    if await _runs(client, fleet):
        return
    try:
        file = await _ask_for_file(client, task_queue, fleet, CHECK_TIMEOUT)
    except ActivityFailureError:
        return  # the job waits until a worker has its fleet
    if file.applied is None:
        raise ConfigError(file.wrong)


async def check_nodes(client: Client, fleet: str, nodes: tuple[str, ...]) -> None:
    """Refuse names that are no nodes of a fleet; do nothing if the fleet does not answer.

    Raises:
        ConfigError: The fleet has no node of one of these names.
    """
    if not nodes or not await _runs(client, fleet):
        return
    try:
        state = await _query(client, fleet, within=0.0)
    except ConfigError:
        return
    for node in nodes if state.nodes else ():
        node_of(state, node)


async def read_withheld_nodes(client: Client, fleet: str) -> dict[str, NodeRecord]:
    """Return the nodes that a fleet withholds from jobs, by name; empty if it does not run."""
    if not await _runs(client, fleet):
        return {}
    state = await _query(client, fleet)
    return {
        record.name: record for record in state.nodes if record.status is not NodeStatus.IN_SERVICE
    }


async def quarantine(
    client: Client,
    task_queue: str,
    fleet: str,
    node: str,
    reason: str,
    drain: bool,
    within: str | None,
) -> Answer:
    """Keep a node from jobs until a person releases it.

    With `drain`, jobs that have the node must leave it, at the latest after the duration `within`.
    """
    who = whoami()
    before = await read(client, task_queue, fleet)
    old = node_of(before, node)

    def is_shown(state: FleetState) -> bool:
        record = _find(state, node)
        return (
            record is not None
            and record.status is NodeStatus.QUARANTINED
            and (state.access is not None or record.by == text(who, MAX_BY_LENGTH))
            and record.since != old.since
            and (record.drain is not None or not drain)
        )

    message = {"node": node, "reason": reason, "by": who, "drain": drain}
    return await _send_signal(
        client, before, "quarantine", {**message, "within": within} if within else message, is_shown
    )


async def release(client: Client, task_queue: str, fleet: str, node: str, reason: str) -> Answer:
    """Vouch for a node, so that jobs may be given it again."""

    before = await read(client, task_queue, fleet)
    old = node_of(before, node)

    def is_shown(state: FleetState) -> bool:
        record = _find(state, node)
        return (
            record is not None
            and record.status is NodeStatus.IN_SERVICE
            and record.drain is None
            and record.since != old.since
        )

    return await _send_signal(
        client, before, "release", {"node": node, "reason": reason, "by": whoami()}, is_shown
    )


async def declare_dead(
    client: Client, task_queue: str, fleet: str, node: str, reason: str, force: bool
) -> tuple[str, ...]:
    """Report a node of a fleet as dead to the running jobs of that fleet that may have ranks there,
    and to the fleet if it keeps the node.

    A fleet keeps a node for a job that has ended but may still have ranks there. Another fleet may
    have another node of the same name: nothing is sent to its jobs. Return who received the report,
    for display.

    Raises:
        ConfigError: No running job of the fleet is concerned, and neither is the fleet; no worker
            answers for it or for one of its running jobs; or the node answers and `force` is not
            given.
    """
    check_name("fleet", fleet)
    check_name("node", node)
    gate = asyncio.Semaphore(MAX_CONCURRENT_READS)

    async def load(name: str) -> JobSnapshot:
        async with gate:
            return await load_job(client, name)

    running = [row.name for row in await list_jobs(client) if row.status == "RUNNING"]
    loaded = await asyncio.gather(*(load(name) for name in running))
    concerned = {
        now.name: now.state.spec.fleet
        for now in loaded
        if now.state is not None
        and node
        in (
            *(slot.node for slot in now.state.slots),
            *now.state.maybe_alive,
            *now.state.lost_names,
        )
    }
    told = tuple(name for name, of in concerned.items() if of == fleet)
    is_kept = await _runs(client, fleet) and _keeps(await _query(client, fleet), node)
    if not force and (told or is_kept):
        await _check_silent(client, task_queue, fleet, node)
    for name in told:
        # force: the node was probed above, or the user insists, so the job need not itself have
        # missed the node for long.
        await signal_open(
            client, name, "report", ReportMessage(node=node, reason=reason, by=whoami(), force=True)
        )
    if is_kept:
        await _send_signal(
            client,
            await _query(client, fleet),
            "declare_dead",
            {"node": node, "reason": reason, "by": whoami()},
            # Where there are no rules it cannot be refused.
            lambda state: state.access is None or not _keeps(state, node),
        )
    everybody = (*told, *((f"fleet {fleet}",) if is_kept else ()))
    # The memo has the fleet once the job's first step is done.
    if silent := [
        now.name for now in loaded if now.state is None and now.memo.get("fleet", fleet) == fleet
    ]:
        told_now = ", ".join(everybody) or "no job"
        raise ConfigError(
            f"node {node} of fleet {fleet}: sent to {told_now}; no worker answers for "
            f"{', '.join(silent)}: start one (`relaunch up` or `relaunch-worker`), then repeat "
            "the command"
        )
    if not everybody:
        others = names(sorted({*concerned.values()}))
        elsewhere = f"; jobs of other fleets have a node of that name: {others}" if others else ""
        raise ConfigError(
            f"node {node} of fleet {fleet}: no running job has ranks on it, and the fleet does not "
            f"keep it for an ended job; nothing was sent{elsewhere}"
        )
    return everybody


def _keeps(state: FleetState, node: str) -> bool:
    """Return whether the fleet keeps a node for possible ranks of an ended submission."""
    return node in (
        place.node
        for record in state.claims
        for place in (record.places if record.is_closed else record.inherited)
    )


async def _check_silent(client: Client, task_queue: str, fleet: str, node: str) -> None:
    """Check that a node does not answer.

    Raises:
        ConfigError: It answers, or no worker could probe it.
    """
    try:
        probes: tuple[NodeProbe, ...] = await client.execute_activity(
            "probe_nodes",
            {"fleet": fleet, "nodes": [node]},
            id=f"probe_nodes/{fleet}/{uuid.uuid4().hex}",
            task_queue=task_queue,
            result_type=tuple[NodeProbe, ...],
            schedule_to_close_timeout=PROBE_TIMEOUT,
            heartbeat_timeout=ACTIVITY_TIMEOUT,
            retry_policy=RetryPolicy(maximum_attempts=1),
            summary=f"whether {node} answers, for {whoami()}",
        )
    except ActivityFailureError as error:
        raise ConfigError(
            f"node {node} of fleet {fleet}: no worker could probe it ({error.cause or error}); to "
            "declare it dead without a probe, add --force"
        ) from None
    [probe] = probes
    if not probe.silent:
        jobs = ", ".join(sorted({f"job {live.job}" for live in probe.generations}))
        lives = f"ranks of {jobs} run there" if jobs else "no rank runs there"
        raise ConfigError(
            f"node {node} of fleet {fleet} answered just now, and {lives}: not declared dead, "
            "because its ranks would keep running beside new ones. Power it off or cut its "
            "network first; to declare it dead anyway, add --force"
        )


async def read_warm(
    client: Client, task_queue: str, fleet: str, record: NodeRecord
) -> tuple[WarmPython, ...] | None:
    """Return what imports ahead on a node; None: no worker or no node answers in time.

    The fleet does not know, so the node is asked: unless it has just given no answer.
    """
    if record.probe is None or record.probe.silent:
        return None
    try:
        probes: tuple[NodeProbe, ...] = await client.execute_activity(
            "probe_nodes",
            {"fleet": fleet, "nodes": [record.name]},
            id=f"probe_nodes/{fleet}/{uuid.uuid4().hex}",
            result_type=tuple[NodeProbe, ...],
            task_queue=task_queue,
            schedule_to_close_timeout=WARM_TIMEOUT,
            retry_policy=RetryPolicy(maximum_attempts=1),
            summary=f"what imports ahead on {record.name}, for {whoami()}",
        )
    except ActivityFailureError:
        return None
    [probe] = probes
    return None if probe.silent else probe.warm


async def pause(client: Client, task_queue: str, fleet: str, reason: str) -> Answer:
    before = await read(client, task_queue, fleet)
    return await _send_signal(
        client,
        before,
        "pause",
        {"reason": reason, "by": whoami()},
        lambda state: bool(state.breaker.paused),
    )


async def resume(client: Client, task_queue: str, fleet: str, reason: str) -> Answer:
    before = await read(client, task_queue, fleet)

    def is_shown(state: FleetState) -> bool:
        # A pause stays where the breaker was open.
        return not state.breaker.is_open and (before.breaker.is_open or not state.breaker.paused)

    return await _send_signal(
        client, before, "resume", {"reason": reason, "by": whoami()}, is_shown
    )


async def apply(
    client: Client, task_queue: str, fleet: str, reason: str
) -> tuple[FleetState, FleetFileContent, Answer]:
    """Have the fleet read its worker's file again.

    Return the state before, the file, and the answer with the state after.
    """
    before = await read(client, task_queue, fleet)
    file = await read_file(client, task_queue, fleet)

    def is_shown(state: FleetState) -> bool:
        nodes = tuple(node.spec for node in state.nodes if not node.is_removed)
        named = sorted(nodes, key=lambda node: node.name)
        return (state.repairs, state.limits, state.access, named) == (
            file.repairs,
            file.limits,
            file.access,
            sorted(file.nodes, key=lambda node: node.name),
        )

    return (
        before,
        file,
        await _send_signal(client, before, "apply", {"reason": reason, "by": whoami()}, is_shown),
    )


async def _send_signal(
    client: Client,
    before: FleetState,
    signal: str,
    message: Mapping[str, Any],
    is_shown: Callable[[FleetState], bool],
) -> Answer:
    handle = client.get_workflow_handle(f"{FLEET_ID_PREFIX}{before.name}")
    await handle.signal(signal, await sign_message(client, handle.id, signal, message))

    def find_refusal(state: FleetState) -> str:
        new = (notice for notice in state.notices if notice not in before.notices)
        texts = (notice.partition(REFUSED)[2] for notice in new if REFUSED in notice)
        return next((text for text in texts if str(message.get("node", "")) in text), "")

    now, done = await _wait_until(
        client,
        before.name,
        lambda state: bool(find_refusal(state)) or is_shown(state),
        EFFECT_TIMEOUT,
    )
    if refusal := find_refusal(now):
        raise ConfigError(refusal)
    return Answer(
        now, done, tuple(notice for notice in now.notices if notice not in before.notices)
    )


def _find(fleet: FleetState, name: str) -> NodeRecord | None:
    return next((record for record in fleet.nodes if record.name == name), None)
