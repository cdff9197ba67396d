"""What is wrong with the service itself, and what to do: `relaunch doctor`."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from temporalio.service import RPCError, RPCStatusCode

from relaunch.builds import Build, Builds, RunningWorkflow, list_running, read_builds
from relaunch.cli.client import WORKFLOW
from relaunch.cli.upgrade import describe_build, read_task, read_task_failure
from relaunch.cli.worker_status import read_statuses
from relaunch.credentials import (
    describe_expiry,
    find_expiry,
    read_credentials,
    read_server_expiry,
)
from relaunch.encryption import EncryptionCodec
from relaunch.messages.ids import FLEET_ID_PREFIX
from relaunch.spec.fleet import SEVERITIES, describe_untaken
from relaunch.temporal import RunKey, read_first_key
from relaunch.text import count_noun, format_time, join_names

if TYPE_CHECKING:
    from temporalio.client import Client

    from relaunch.messages.workers import WorkerStatus

MAX_CALLS = 16
"""Most describe calls at once."""
NOTIFIER = "Notifier"
"""The type of the workflow that notifies people of a fleet."""
ANSWER_TIMEOUT = timedelta(seconds=10)
WAITS_AFTER = timedelta(seconds=30)
"""How long a workflow task may wait for a worker."""


@dataclass(frozen=True, slots=True)
class Check:
    subject: str
    """server, builds, or the id of a workflow."""
    text: str
    action: str = ""
    """What to do about it; empty: nothing is wrong."""


async def examine_service(client: Client, task_queue: str) -> list[Check]:
    """Look at the server, keys, the workers' builds, their fleet files, dead man's switches and
    channels, and every running workflow's task."""
    from temporalio.api.workflowservice.v1 import GetSystemInfoRequest

    info = await client.workflow_service.get_system_info(GetSystemInfoRequest())
    address = client.service_client.config.target_host
    server = f"{address}, namespace {client.namespace}, Temporal {info.server_version}"
    found = [Check("server", server)]
    now = datetime.now(UTC)
    found += await asyncio.to_thread(examine_certificates, address, now)
    builds = await read_builds(client, task_queue)
    if builds.current is None:
        found.append(
            Check("builds", f"no worker serves task queue {task_queue}", "start relaunch-worker")
        )
    for build in builds.known:
        if check := await _examine_build(client, task_queue, build, builds.current, now):
            found.append(check)
    running = await list_running(client, task_queue)
    found.append(await _examine_keys(client, running))
    gate = asyncio.Semaphore(MAX_CALLS)

    async def examine(workflow: RunningWorkflow) -> Check | None:
        async with gate:
            return await _examine_task(client, workflow, builds, now)

    tasks = await asyncio.gather(*(examine(one) for one in running))
    found += [one for one in tasks if one is not None]
    notifiers = [one.id for one in running if one.type == NOTIFIER]
    for checks in await asyncio.gather(*(_examine_channels(client, one) for one in notifiers)):
        found += checks
    # Also where no worker was heard yet: one says that it is there 10 s after its start.
    workers = await read_statuses(client, task_queue)
    if workers or any(build.has_worker(now) for build in builds.known):
        found += examine_files(workers)
        found += examine_rules(workers)
        found += examine_routes(workers)
        found += examine_heartbeats(workers, {one.id for one in running})
        found += [
            Check(
                "certificates",
                f"{one.certificate_expiry}, of worker {one.worker}",
                "replace it there; the worker takes the new one within a minute",
            )
            for one in workers
            if one.certificate_expiry
        ]
    if not any(tasks):
        found.append(Check("workflows", f"{len(running)} run, and none of their tasks fails"))
    return found


def examine_certificates(address: str, now: datetime) -> list[Check]:
    """Return a check for each certificate on the way to the server that has ended or ends soon, and
    one if TLS is used and none does."""
    credentials = read_credentials()
    if credentials.config.get("target_host") != address or not credentials.has_tls:
        return []
    ends = [
        (one, action)
        for one, action in (
            (find_expiry(credentials), "replace it; the next command uses the new one"),
            (
                read_server_expiry(address, credentials.server_name),
                "the server, or the proxy before it, needs a new one",
            ),
        )
        if one is not None
    ]
    found = [
        Check("certificates", text, action)
        for one, action in ends
        if (text := describe_expiry(one, now))
    ]
    if not found and ends:
        first = min((one for one, _ in ends), key=lambda one: one.at)
        found.append(
            Check("certificates", f"the first to end is {first.item}: {format_time(first.at)}")
        )
    return found


async def _examine_keys(client: Client, running: tuple[RunningWorkflow, ...]) -> Check:
    """Say which keys the running workflows need: an older one may be deleted once none does."""
    codec = client.data_converter.payload_codec
    active = codec.active if isinstance(codec, EncryptionCodec) else None
    gate = asyncio.Semaphore(MAX_CALLS)

    async def read(workflow: RunningWorkflow) -> RunKey | None:
        async with gate:
            return await read_first_key(client, workflow.id, workflow.run_id)

    keys = [one for one in await asyncio.gather(*(read(one) for one in running)) if one]
    needed = Counter(one.id for one in keys)
    if active is None and set(needed) <= {None}:
        return Check("encryption", "payloads are not encrypted")
    begun = [
        f"{count} with {'none' if id is None else f'key {id}'}"
        for id, count in sorted(needed.items(), key=lambda one: one[0] or "")
    ]
    text = f"key {active} encrypts" if active else "nothing is encrypted from now on"
    text = f"{text}; of the running workflows began {join_names(begun, 8) or 'none'}"
    if isinstance(codec, EncryptionCodec) and codec.required:
        lax = sum(not one.is_required for one in keys)
        text += f"; {lax or 'none'} of them still {'takes' if lax == 1 else 'take'} plain messages"
    return Check("encryption", text)


async def _examine_build(
    client: Client, task_queue: str, build: Build, current: Build | None, now: datetime
) -> Check | None:
    works_for = await list_running(client, task_queue, build.id)
    if not build.is_current and not works_for and not build.has_worker(now):
        return None  # history
    what = "is current" if build.is_current else "is not current"
    text = (
        f"{build.id} {what}, {describe_build(build, now)}"
        f" and {count_noun(len(works_for), 'running workflow')}"
    )
    action = ""
    if not build.has_worker(now):
        if build.is_current:
            action = "start relaunch-worker: nothing is decided until then"
        elif works_for:
            by = f"{current.id} takes them over" if current else "a newer one takes them over"
            action = (
                f"{by} within a minute or says in its log why not; if not, start a worker of"
                f" {build.id} beside it, which hands them over"
            )
    return Check("builds", text, action)


async def _examine_task(
    client: Client, workflow: RunningWorkflow, builds: Builds, now: datetime
) -> Check | None:
    try:
        task = await read_task(client, workflow)
        if task.attempt > 1 and (failure := await read_task_failure(client, workflow)):
            return Check(
                workflow.id,
                f"its workflow task fails (attempt {task.attempt}): {failure}",
                _advise(workflow, task.build, builds),
            )
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:  # it has ended meanwhile
            return None
        raise
    if task.since is not None and now - task.since > WAITS_AFTER:
        seconds = round((now - task.since).total_seconds())
        return Check(
            workflow.id, f"no worker takes its workflow task since {seconds} s", "see builds"
        )
    return None


def _advise(workflow: RunningWorkflow, build: str, builds: Builds) -> str:
    """Return what to do about a workflow whose tasks fail on a build."""
    current, previous = builds.current, builds.previous
    command = ""
    if current is not None and build not in ("", current.id):
        command = f"`relaunch rollback {current.id}` tries again to move it there from {build}, or "
    elif current is not None and previous is not None:
        # After a rollback that is the newer one: whether it is the better one, a person knows.
        command = (
            f"`relaunch rollback {previous.id}` returns to the build that was current before"
            f" {current.id}, or "
        )
    unwatched = "its ranks run on unwatched; " if workflow.type == WORKFLOW else ""
    return f"{unwatched}{command}install a release that continues it"


async def _examine_channels(client: Client, notifier: str) -> list[Check]:
    """Return a check for each channel of a fleet whose last message was not delivered."""
    from temporalio.client import WorkflowQueryFailedError, WorkflowQueryRejectedError

    from relaunch.messages.notices import Outbox

    try:
        outbox: Outbox = await client.get_workflow_handle(notifier).query(
            "state", result_type=Outbox, rpc_timeout=ANSWER_TIMEOUT
        )
    except (RPCError, WorkflowQueryFailedError, WorkflowQueryRejectedError):
        return []  # a workflow that no worker answers for is reported by its task, or its build
    return [
        Check(
            notifier,
            f"{one.channel} delivers nothing since {one.since:%Y-%m-%d %H:%M:%S} UTC"
            f" ({count_noun(one.failures, 'failure')}): {one.reason}",
            "mend it, or change notify: in the fleet file",
        )
        for one in outbox.failing
    ]


def examine_files(workers: list[WorkerStatus]) -> list[Check]:
    """Return a check for each fleet file that a worker cannot use, and one if all can be used."""
    if not workers:
        return [Check("fleet files", "no worker says whether it can use them")]
    names: dict[tuple[str, str], list[str]] = {}
    for worker in workers:
        for file in worker.unusable_files:
            names.setdefault((file.reason, file.fleet), []).append(worker.worker)
    if not names:
        who = join_names([one.worker for one in workers], 4)
        return [
            Check("fleet files", f"all can be used, by {count_noun(len(workers), 'worker')}: {who}")
        ]
    found = []
    for (reason, fleet), by in names.items():
        if fleet:
            result = f"fleet {fleet} is served by its last good content"
            action = "mend the file; it is read again within a minute"
        else:
            result = "its fleet is not served"
            action = "mend the file, then restart the worker"
        found.append(
            Check("fleet files", f"{reason}; {result}, by worker {join_names(by, 4)}", action)
        )
    return found


def examine_rules(workers: list[WorkerStatus]) -> list[Check]:
    """Return a check for each worker that does not know who may do what in a fleet.

    Orders to a job are checked by whichever worker of the task queue gets the activity.
    """
    found = []
    said = {one.worker: one.rules for one in workers if one.rules is not None}
    names = {name for rules in said.values() for name, digest in rules.items() if digest}
    for fleet in sorted(names):
        known = {rules[fleet] for rules in said.values() if rules.get(fleet)}
        without = [worker for worker, rules in said.items() if not rules.get(fleet)]
        if without:
            text = f"not known to worker {join_names(without, 4)}: it takes every order to its jobs"
        elif len(known) > 1:
            text = "the fleet files of its workers differ in it, so the same order may be refused"
        else:
            continue
        found.append(
            Check(
                f"access of {fleet}",
                text,
                "give all workers of this task queue the same file of the fleet",
            )
        )
    return found


def examine_routes(workers: list[WorkerStatus]) -> list[Check]:
    """Return a check for each fleet of which people are not told everything; only what is critical
    needs an action."""
    found: dict[str, Check] = {}
    for worker in workers:
        for fleet, untaken in (worker.untaken or {}).items():
            subject = f"channels of {fleet}"
            if untaken.keys() == SEVERITIES.keys() and not any(untaken.values()):
                text = "it has none, so no person is notified of anything: add notify: to its file"
                found.setdefault(subject, Check(subject, text))
                continue
            is_grave = any(SEVERITIES.get(event) == "critical" for event in untaken)
            found[subject] = Check(
                subject,
                f"no channel takes {describe_untaken(untaken)}",
                "add a channel to notify: in the fleet file, or let one take more"
                if is_grave
                else "",
            )
    return [found[one] for one in sorted(found)]


def examine_heartbeats(workers: list[WorkerStatus], running: set[str]) -> list[Check]:
    """Return a check for each dead man's switch, whether it is requested or not."""
    found = []
    for fleet in sorted({one.fleet for worker in workers for one in worker.heartbeats}):
        known = [one for worker in workers for one in worker.heartbeats if one.fleet == fleet]
        id = f"{FLEET_ID_PREFIX}{fleet}"
        failing = [one for one in known if one.failing_since is not None]
        accepted = max((one.accepted_at for one in known if one.accepted_at), default=None)
        what = f"its dead man's switch ({known[0].name})"
        if id not in running:
            text = f"{what} is not requested: the fleet does not run"
            found.append(Check(id, text, f"`relaunch nodes list --fleet {fleet}` starts it"))
        elif failing:
            since = format_time(min(one.failing_since for one in failing if one.failing_since))
            text = f"{what} is not requested since {since}: {failing[0].reason}"
            found.append(Check(id, text, "mend that, or change heartbeat: in the fleet file"))
        elif accepted is None:
            found.append(Check(id, f"{what} was not requested by these workers yet"))
        else:
            found.append(Check(id, f"{what} was last requested at {format_time(accepted)}"))
    return found


def row(one: Check) -> dict[str, str]:
    """Return an entry of `doctor --json`; its keys are a stable interface."""
    return {"subject": one.subject, "text": one.text, "action": one.action}


def lines(found: list[Check]) -> list[str]:
    width = max(len(one.subject) for one in found)
    printed = []
    for one in found:
        mark = "!" if one.action else " "
        printed.append(f"{mark} {one.subject:<{width}}  {one.text}")
        if one.action:
            printed.append(f"  {'':<{width}}  -> {one.action}")
    return printed
