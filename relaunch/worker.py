"""The worker, which wires everything: settings, connection, fleets, activities, workflows."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import glob
import hashlib
import json
import logging
import os
import resource
import signal
import sys
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from temporalio.bridge.proto.activity_task import Start
from temporalio.client import Client
from temporalio.runtime import PrometheusConfig, Runtime, TelemetryConfig
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import (
    PollerBehavior,
    PollerBehaviorAutoscaling,
    PollerBehaviorSimpleMaximum,
    Worker,
)

from relaunch.activities.access import AccessActivities
from relaunch.activities.examine import NodeActivities
from relaunch.activities.fleet import FleetActivities
from relaunch.activities.launch import JobActivities
from relaunch.activities.links import LinkActivities
from relaunch.activities.logs import LogActivities
from relaunch.activities.notify import PeopleActivities
from relaunch.activities.pings import Pinger
from relaunch.activities.records import RecordActivities
from relaunch.activities.repairs import RepairActivities
from relaunch.activities.running_watches import RunningWatches
from relaunch.activities.sampler import StateSampler
from relaunch.activities.task_events import TaskEvents
from relaunch.activities.traces import TraceSender
from relaunch.activities.watch import WatchActivities
from relaunch.activities.worker_status import WorkerStatusActivities
from relaunch.backends import cores
from relaunch.backends.artifact import build_agent
from relaunch.backends.base import Backend, EventQueue, TellsPeople
from relaunch.backends.local import LocalBackend
from relaunch.backends.sessions import SessionBackend
from relaunch.builds import HEARTBEAT_INTERVAL, build_id, deployment, list_running
from relaunch.cli.files import read_fleet
from relaunch.config import (
    ConfigError,
    Settings,
    describe_settings,
    find_trace_endpoint,
    read_settings,
)
from relaunch.credentials import ServerUnavailable, read_credentials
from relaunch.encryption import ActivityCodec, EncryptionCodec
from relaunch.handover import Handover
from relaunch.messages.workers import UnusableFile
from relaunch.renewal import Renewal, make_renewable
from relaunch.spec.fleet import DeadManSwitch, FleetSpec, find_untaken
from relaunch.temporal import (
    check_keys,
    check_required,
    connect,
    ensure_namespace,
    explain_refusal,
    read_server_id,
    set_runtime,
)
from relaunch.text import count_noun, printable
from relaunch.worker_log import MAX_LOG_LINE, forward_sdk_log, start_log
from relaunch.workflows.fleet.workflow import Fleet
from relaunch.workflows.node_repair.workflow import NodeRepair
from relaunch.workflows.notifier.workflow import Notifier
from relaunch.workflows.runner import TaskRunner
from relaunch.workflows.training_job.metrics import BUCKETS
from relaunch.workflows.training_job.traces import set_sink
from relaunch.workflows.training_job.workflow import TrainingJob

WORKFLOW_TASKS = 8
"""Maximum number of concurrent workflow tasks. They share one interpreter: of a hundred at once,
each would take as long as all of them together, exceed the workflow task timeout and be retried,
endlessly."""
WATCHES = "watches"
"""Folder, in the state folder, of the watches that each worker has."""
ARCHIVE = "archive"
"""Folder, in the state folder, of the older incidents of jobs."""
KEPT_FLEETS = "served-fleets"
"""Folder, in the state folder, of copies of the fleet files as they were last served."""
TAKE_OVER_INTERVAL_S = 0.5
"""Seconds between two looks for workers on the same state folder that were killed."""
LOOK_INTERVAL_S = 2.0
"""The same where no other worker lives: one may have been started since."""
PORT_INTERVAL_S, PORT_TIMEOUT_S = 0.01, 30.0
CONNECT_INTERVAL_S = 2.0
"""Seconds between two tries to reach a server that is away when the worker starts."""
AWAY = (RPCStatusCode.UNAVAILABLE, RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED)
"""What a call gets from a server that is not there, or only starts."""
SDK_THREADS = "TOKIO_WORKER_THREADS"
M_ARENA_MAX = -8
"""Of mallopt(3)."""
NEAR_POLLERS = 5
"""Polls for workflow tasks, and as many for activities, at a server on this machine."""
CHECKED_WORKFLOWS, CHECKED_HISTORIES = 5000, 200
"""How many workflows a worker proves at its start that it can read, and the histories of how many.
One that it cannot read later waits for a worker that can."""
OTHER_ACTIVITIES = 50
"""Activity slots in addition to those of the watches: launches, stops, reading logs. A watch holds
its slot for as long as the job runs."""


class UnreadFleetError(Exception):
    """A fleet is not known, and may be the one of a fleet file that cannot be used.

    Activities that it ends are retried: by this worker once the file is mended and the worker is
    restarted, or by another one that knows the fleet.
    """


@dataclass(slots=True)
class WorkerFleets:
    """The fleets that this worker's fleet files name."""

    specs: dict[str, FleetSpec] = field(default_factory=dict)
    backends: dict[str, Backend] = field(default_factory=dict)
    files: dict[str, tuple[Path, Callable[[Path, FleetSpec], Backend]]] = field(
        default_factory=dict
    )
    """The file each fleet was read from, and the factory of its backend; a fleet that is in no file
    stays as it is."""
    signatures: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Signature of each file (see `_read_signature`) when it was last read."""
    replaced: weakref.WeakSet[Backend] = field(default_factory=weakref.WeakSet)
    """Backends of earlier versions of the fleets that operations in progress still use. Their
    connections are closed one by one, each after the last of these on it."""
    replaced_lasting: list[Backend] = field(default_factory=list)
    """The same of backends without sessions (ECS), closed when the worker ends: tasks in the
    background use them."""
    server: str = ""
    """The id of the Temporal server that this worker works for."""
    kept: Path | None = None
    """Folder of copies of the fleet files as they were last served; None: none are kept."""
    unread: dict[Path, str] = field(default_factory=dict)
    """Fleet files that could not be used when the worker started, and never before, with why."""
    wrong: dict[str, str] = field(default_factory=dict)
    """Fleets that are served as they were, because their files cannot be used, with why."""

    def set_server(self, server: str) -> None:
        """Set the Temporal server in whose name nodes get orders; call before the first order."""
        self.server = server
        for backend in self.backends.values():
            backend.server = server

    def reload(self, fleet: str) -> FleetSpec:
        """Read the fleet's file again, and serve what it now says.

        Raises:
            KeyError: there is no such fleet.
            ValueError: the file cannot be used any more; the fleet is served as it was.
        """
        before = self.specs.get(fleet) or self.spec(fleet)
        if fleet not in self.files:
            return before
        path, make_backend = self.files[fleet]
        self.signatures[fleet] = _read_signature(path)
        try:
            spec = read_fleet(path)
            if spec.name != fleet:
                raise ConfigError(
                    f"fleet file {path}: its name is {spec.name!r} now, expected {fleet!r}"
                    " until the worker is restarted"
                )
            if spec != before:
                backend = make_backend(path, spec)
                backend.server = self.server
                self._retire(self.backends[fleet])
                self.specs[fleet], self.backends[fleet] = spec, backend
                self.keep(path)
        except ConfigError as error:
            self.wrong[fleet] = str(error)
            raise ValueError(str(error)) from None
        self.wrong.pop(fleet, None)
        return spec

    def _retire(self, backend: Backend) -> None:
        if isinstance(backend, SessionBackend):
            backend.retire()
            self.replaced.add(backend)
        else:
            self.replaced_lasting.append(backend)

    def list_unusable(self) -> tuple[UnusableFile, ...]:
        """Return the fleet files that cannot be used as they are now."""
        return (
            *(UnusableFile(reason, fleet) for fleet, reason in sorted(self.wrong.items())),
            *(UnusableFile(reason) for reason in self.unread.values()),
        )

    def list_heartbeats(self) -> dict[str, DeadManSwitch]:
        """Return the dead man's switches, by fleet."""
        return {
            name: spec.heartbeat for name, spec in self.specs.items() if spec.heartbeat is not None
        }

    def list_rules(self) -> dict[str, str]:
        """Return a digest of the rules of each fleet, empty for one without rules."""
        return {
            name: ""
            if spec.access is None
            else hashlib.sha256(
                json.dumps(spec.access.model_dump(mode="json"), sort_keys=True).encode()
            ).hexdigest()[:12]
            for name, spec in self.specs.items()
        }

    def count_warm(self) -> dict[str, int]:
        """Return to how many nodes there is an open session, by fleet; tasks of ECS have others."""
        return {
            name: backend.count_warm()
            for name, backend in self.backends.items()
            if isinstance(backend, SessionBackend)
        }

    def list_untaken(self) -> dict[str, dict[str, str]]:
        """Return what no channel takes, by fleet; a topic takes everything."""
        found: dict[str, dict[str, str]] = {}
        for name, spec in self.specs.items():
            backend = self.backends[name]
            has_topic = isinstance(backend, TellsPeople) and backend.has_topic
            if not has_topic and (untaken := find_untaken(spec.notify)):
                found[name] = untaken
        return found

    def keep(self, path: Path) -> None:
        """Copy a fleet file that is served into the state folder, for starts while it is bad."""
        if self.kept is None:
            return
        copy = find_copy(self.kept, path)
        new = copy.with_suffix(f".{os.getpid()}")
        try:
            self.kept.mkdir(mode=0o700, parents=True, exist_ok=True)
            new.touch(mode=0o600)  # it may have an address of a channel, which is a secret
            new.write_bytes(path.read_bytes())
            new.replace(copy)
        except OSError as error:
            logging.getLogger("relaunch").warning(
                "fleet file %s cannot be copied to %s: %s", path, copy, error.strerror
            )

    def spec(self, fleet: str) -> FleetSpec:
        """Return the fleet's specification, by the file as it is now if that can be used.

        Raises:
            KeyError: there is no such fleet; its message is one sentence.
            UnreadFleetError: a file that cannot be used may be the fleet's.
        """
        if fleet not in self.specs and self.unread:
            raise UnreadFleetError(
                f"fleet {fleet!r} is not known to this worker, and may be that of a fleet file"
                f" that it cannot use: {'; '.join(self.unread.values())}"
            )
        if fleet not in self.specs:
            raise KeyError(
                f"fleet {fleet!r} is not known to this worker,"
                f" it serves {', '.join(sorted(self.specs)) or 'none'}"
            )
        self._reload_if_changed(fleet)
        return self.specs[fleet]

    def backend(self, fleet: str) -> Backend:
        self.spec(fleet)
        return self.backends[fleet]

    def _reload_if_changed(self, fleet: str) -> None:
        """Read the file again if it has changed.

        Of several workers only one runs the activity that reads it again, but the others are also
        asked about its new nodes.
        """
        if fleet not in self.files or self.signatures.get(fleet) in (
            None,
            _read_signature(self.files[fleet][0]),
        ):
            return
        try:
            self.reload(fleet)
        except ValueError as error:
            # the activity that reads the file for the fleet reports the error to people
            logging.getLogger("relaunch").warning("fleet %s is served as it was: %s", fleet, error)

    async def close(self) -> None:
        for backend in (*self.replaced, *self.replaced_lasting, *self.backends.values()):
            await backend.close()


def find_copy(folder: Path, path: Path) -> Path:
    """Return where this release keeps the copy of a fleet file in a folder.

    Each release has its own, and leaves those of others: after a rollback, an older one may find
    keys in the file that it does not know, and then has to have what it could read.
    """
    return folder / f"{_name_copies(path)}.{version('relaunch')}.yaml"


def list_copies(folder: Path, path: Path) -> list[Path]:
    """Return the copies of a fleet file to try: this release's own, or else others, newest first.

    Those of others are not tried beside an own one: they need not have the fleet's rules.
    """
    written = {}
    for copy in folder.glob(f"{glob.escape(_name_copies(path))}*.yaml"):
        with contextlib.suppress(OSError):
            written[copy] = copy.stat().st_mtime
    own = find_copy(folder, path)
    if own in written:
        return [own]
    return sorted(written, key=lambda copy: written[copy], reverse=True)


def _name_copies(path: Path) -> str:
    """Return the name of the copies of a file. 0.1.0 adds nothing to it but `.yaml`."""
    return f"{path.stem}-{hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:12]}"


def _read_signature(path: Path) -> tuple[int, int, int]:
    """Return values that differ once a file has been written: zeros if there is none."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_size, found.st_ino


def make_fleets(settings: Settings) -> WorkerFleets:
    """Read the fleet files and make a backend for each.

    A file that cannot be used does not keep the others from being served: its fleet is served as
    it last was on this state folder, or not at all.

    Raises:
        ConfigError: no file can be used, two have the same name, or a backend is not available yet.
    """
    fleets = WorkerFleets(kept=settings.state / KEPT_FLEETS)
    agent = build_agent(settings.state / "agent")

    def make_backend(path: Path, spec: FleetSpec) -> Backend:
        if spec.backend == "local":
            return LocalBackend(spec, settings.state, agent, settings.answer_within)
        if spec.backend == "ssh":
            # Imported here and not above: a worker of local nodes need not wait for the import of
            # paramiko.
            from relaunch.backends.ssh.backend import SshBackend

            try:
                return SshBackend(spec, agent, settings.answer_within)
            except ValueError as error:
                raise ConfigError(f"fleet file {path}: {error}") from None
        if spec.backend == "ecs":
            from relaunch.backends.ecs.backend import EcsBackend
            from relaunch.backends.ecs.options import options

            try:
                ecs_options = options(spec, os.environ)
            except ValueError as error:
                raise ConfigError(f"fleet file {path}: {error}") from None
            if ecs_options.node_task is None:
                logging.getLogger("relaunch").warning(
                    "fleet %s names no ecs.node_task: no reboot of its nodes can be proven, so none"
                    " is ordered; a node is repaired by stop and start, which erases its instance"
                    " store",
                    spec.name,
                )
            return EcsBackend(spec, ecs_options)
        raise ConfigError(
            f"fleet file {path}: backend {spec.backend!r} is for tests, expected local, ssh or ecs"
        )

    log = logging.getLogger("relaunch")
    for path in settings.fleets:
        signature = _read_signature(path)
        bad: ConfigError | None = None
        try:
            spec = read_fleet(path)
            backend = make_backend(path, spec)
        except ConfigError as error:
            bad = error
            for copy in list_copies(settings.state / KEPT_FLEETS, path):
                with contextlib.suppress(ConfigError):
                    spec = read_fleet(copy)
                    backend = make_backend(copy, spec)
                    break
            else:
                fleets.unread[path] = str(bad)
                continue
        if spec.name in fleets.specs:
            raise ConfigError(
                f"fleet file {path}: another fleet file of this worker has the name {spec.name!r}"
            )
        if bad is not None:
            log.error("fleet %s is served as it last was: %s", spec.name, bad)
            fleets.wrong[spec.name] = str(bad)
        fleets.backends[spec.name] = backend
        fleets.specs[spec.name], fleets.files[spec.name] = spec, (path, make_backend)
        fleets.signatures[spec.name] = signature
        if bad is None:
            fleets.keep(path)
    if fleets.unread and not fleets.specs:
        raise ConfigError("; ".join(fleets.unread.values()))
    for error_text in fleets.unread.values():
        log.error(
            "%s; its fleet is not served: mend the file, then restart this worker", error_text
        )
    return fleets


def make_worker(
    client: Client,
    settings: Settings,
    fleets: WorkerFleets,
    build: str | None = None,
    running: RunningWatches | None = None,
    pinger: Pinger | None = None,
    renewal: Renewal | None = None,
    *,
    is_near: bool = False,
) -> Worker:
    """Return the worker. Without a build it works for whatever no worker with a build works for.

    With `is_near`, the server is on this machine.
    """
    # Autoscaling wakes an idle worker 42 times a second, for 0.14 % of a core; with fixed polls it
    # wakes twice (0.02 %). It is for far servers: a poll to a near one takes some milliseconds.
    pollers: PollerBehavior = (
        PollerBehaviorSimpleMaximum(NEAR_POLLERS) if is_near else PollerBehaviorAutoscaling()
    )
    running = running or RunningWatches(settings.state / WATCHES)
    pinger = pinger or Pinger(client, fleets.list_heartbeats)
    jobs, watch = JobActivities(fleets, client), WatchActivities(fleets, client, running)
    nodes = NodeActivities(fleets)
    fleet = FleetActivities(fleets, client, settings.task_queue, pinger.note_round)
    records, logs = (
        RecordActivities(settings.state / ARCHIVE),
        LogActivities(fleets, settings.state / ARCHIVE),
    )
    people = PeopleActivities(fleets, client, settings.task_queue, settings.web_ui or "")
    runner = TaskRunner(settings.encryption_required, running)
    worker = Worker(
        client,
        task_queue=settings.task_queue,
        workflows=[TrainingJob, NodeRepair, Fleet, Notifier],
        activities=[
            jobs.launch_ranks,
            jobs.stop_ranks,
            watch.watch_ranks,
            records.archive_incidents,
            nodes.examine_nodes,
            nodes.check_nodes,
            nodes.find_foreign_processes,
            nodes.read_terms,
            nodes.order_repair,
            RepairActivities(client).follow_repair,
            AccessActivities(fleets).check_order,
            LinkActivities(fleets).check_links,
            fleet.read_fleet,
            fleet.probe_nodes,
            fleet.watch_fleet,
            fleet.read_last_state,
            fleet.count_free_nodes,
            fleet.find_jobs,
            fleet.find_closed_jobs,
            fleet.reclaim,
            fleet.tell_fleet,
            people.tell_people,
            people.deliver_notices,
            people.send_test,
            WorkerStatusActivities(
                client,
                fleets.list_unusable,
                pinger.list_status,
                renewal.describe_expiry if renewal else str,
                fleets.list_rules,
                fleets.list_untaken,
            ).read_worker_status,
            logs.read_logs,
            logs.read_stacks,
            logs.read_checkpoints,
            logs.read_incidents,
        ],
        # The sandbox imports our modules again for every job and guards each call, which took most
        # of the time of a worker with many jobs. The tests replay every history in it:
        # docs/decisions/0015-workflows-outside-the-sandbox.md.
        workflow_runner=runner,
        deployment_config=deployment(settings.task_queue, build) if build else None,
        max_concurrent_activities=settings.jobs + OTHER_ACTIVITIES,
        max_concurrent_workflow_tasks=WORKFLOW_TASKS,
        # A job that is not in the cache is replayed from its whole history at each event.
        max_cached_workflows=max(1000, 2 * settings.jobs),
        workflow_task_poller_behavior=pollers,
        activity_task_poller_behavior=pollers,
        # When 300 jobs began together, 242 tasks waited longer than 2 s for their worker. Each was
        # then replayed from its whole history, which made the others wait longer. A killed worker
        # delays nothing by it: the one that takes over its watches ends this wait.
        sticky_queue_schedule_to_start_timeout=timedelta(seconds=10),
        # Cancellations are delivered with heartbeats, and so is the progress shown to people.
        max_heartbeat_throttle_interval=timedelta(seconds=1),
        graceful_shutdown_timeout=timedelta(seconds=settings.graceful_shutdown),
    )
    _leave_unreadable_activities(worker, client)
    return runner.attach(worker)


def _leave_unreadable_activities(worker: Worker, client: Client) -> None:
    """Have the worker's activities use a codec that fails none of them for want of a key, and begin
    with no progress that was not encrypted where that is required.

    The SDK has one converter for both, no public name for this, and its version is pinned.
    """
    converter = client.data_converter
    if not isinstance(converter.payload_codec, EncryptionCodec):
        return
    codec = ActivityCodec(converter.payload_codec, _report_unreadable)
    activities = worker._activity_worker
    assert activities is not None
    activities._data_converter = replace(converter, payload_codec=codec)
    execute = activities._execute_activity

    async def execute_proven(start: Start, *others: Any) -> Any:
        await codec.check_progress(start.heartbeat_details)
        return await execute(start, *others)

    setattr(activities, execute.__name__, execute_proven)


def _report_unreadable(reason: str) -> None:
    logging.getLogger("relaunch").error("%s", reason)


async def serve(settings: Settings, build: str | None, is_near: bool = False) -> None:
    """Work until SIGTERM or SIGINT; then hand over what is running and end."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    fleets = make_fleets(settings)
    _allow_connections(fleets)
    if is_near:
        await _wait_for_port(stop)
    reached = await _reach_server(settings, stop)
    if reached is None:
        return
    client, renewal = reached
    fleets.set_server(renewal.server)
    background = [
        asyncio.create_task(one)
        for one in (
            *([Handover(client, settings.task_queue, build).run()] if build else []),
            *_make_background_tasks(client, fleets),
        )
    ]
    running = RunningWatches(settings.state / WATCHES)
    running.open(client.identity)
    pinger = Pinger(client, fleets.list_heartbeats)
    # Also before the first incident is archived: a backup of it is then empty, and does not fail.
    (settings.state / ARCHIVE).mkdir(parents=True, exist_ok=True)
    gc.freeze()
    gc.enable()
    traces = _trace_incidents(settings)
    others: list[asyncio.Task[None]] = []
    try:
        async with make_worker(
            client, settings, fleets, build, running, pinger, renewal, is_near=is_near
        ) as worker:
            others.append(asyncio.create_task(_renew(renewal, worker)))
            others.append(asyncio.create_task(_take_over_watches(client, running)))
            others.append(asyncio.create_task(_ping(pinger)))
            if settings.metrics:
                others.append(asyncio.create_task(_sample(client, settings, fleets, running)))
            logging.getLogger("relaunch").info(
                "worker of %s serves task queue %s, fleets %s",
                f"build {build}" if build else "no build",
                settings.task_queue,
                ", ".join(fleets.specs),
            )
            await asyncio.wait(
                {asyncio.create_task(stop.wait()), *background}, return_when=asyncio.FIRST_COMPLETED
            )
        for one in background:
            if one.done():
                one.result()  # raises unexpected errors
    finally:
        ending = [*background, *others]
        for one in ending:
            one.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        if traces is not None:
            await asyncio.to_thread(traces.close)
        await fleets.close()


def _allow_connections(fleets: WorkerFleets) -> None:
    """Allow this process as many open files as it may have: each node of a fleet needs some.

    Where all nodes are folders, their agents are children of this process, and would inherit it.
    """
    if any(spec.backend != "local" for spec in fleets.specs.values()):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _wait_for_port(stop: asyncio.Event) -> None:
    """Wait until a server of this machine listens, which may have been started with this worker.

    If it does not, the connection says why.
    """
    host, _, port = (read_credentials().config.get("target_host") or "").rpartition(":")
    deadline = time.monotonic() + PORT_TIMEOUT_S
    while host and not stop.is_set() and time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
            return
        await asyncio.sleep(PORT_INTERVAL_S)


async def _reach_server(settings: Settings, stop: asyncio.Event) -> tuple[Client, Renewal] | None:
    """Connect, and prepare the namespace; wait for as long as the server is away.

    Return None if this process has to end before that.

    Raises:
        ConfigError: the server refuses this worker, or its configuration cannot be used.
    """
    log = logging.getLogger("relaunch")
    last = ""
    while not stop.is_set():
        try:
            credentials = read_credentials()
            client = make_renewable(await connect(settings.state))
            await check_keys(client, CHECKED_WORKFLOWS, CHECKED_HISTORIES)
            if settings.encryption_required:
                running = await list_running(client, settings.task_queue)
                await check_required(client, [(one.id, one.run_id) for one in running])
            await ensure_namespace(client)
            server = await read_server_id(client)
            return client, Renewal(client, settings.state, credentials, server)
        except ServerUnavailable as error:
            reason = str(error)
        except RPCError as error:
            refusal = explain_refusal(error)
            if not isinstance(refusal, ServerUnavailable) and error.status not in AWAY:
                raise refusal from None
            reason = str(refusal)
        if reason != last:
            log.warning("%s; this worker tries again every %g s", reason, CONNECT_INTERVAL_S)
            last = reason
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), CONNECT_INTERVAL_S)
    return None


def _trace_incidents(settings: Settings) -> TraceSender | None:
    """Have the traces of incidents sent, if an endpoint for them is configured.

    One that cannot be used is logged and ignored: it may be a variable for all programs of a
    machine, and jobs need this worker.
    """
    try:
        found = find_trace_endpoint()
    except ConfigError as error:
        logging.getLogger("relaunch").error("%s; no incident is traced", error)
        return None
    if found is None:
        return None
    traces = TraceSender(found[0], settings.web_ui or "")
    traces.start()
    set_sink(traces.submit)
    return traces


async def _take_over_watches(client: Client, running: RunningWatches) -> None:
    """Have the watches of killed workers on this state folder offered again. Without it that
    happens by their time-outs."""
    while True:
        try:
            if count := await running.take_over(client):
                watches = count_noun(count, "watch", "watches")
                logging.getLogger("relaunch").info("took over %s of killed workers", watches)
        except (OSError, RPCError) as error:
            logging.getLogger("relaunch").warning("watches are taken over later: %s", error)
        await asyncio.sleep(TAKE_OVER_INTERVAL_S if running.others else LOOK_INTERVAL_S)


async def _sample(
    client: Client, settings: Settings, fleets: WorkerFleets, running: RunningWatches
) -> None:
    """Set the gauges of /metrics. An error ends the sampling, as its age shows, not the worker."""
    meter = Runtime.default().metric_meter
    sampler = StateSampler(
        client,
        settings.task_queue,
        lambda: fleets.specs,
        running,
        meter,
        lambda: len(fleets.list_unusable()),
        fleets.count_warm,
    )
    try:
        await sampler.run()
    except Exception:
        logging.getLogger("relaunch").exception("the state of fleets and jobs is not sampled")


async def _ping(pinger: Pinger) -> None:
    """Request dead man's switches. An error ends that, as the alarm shows, not the worker."""
    try:
        await pinger.run()
    except Exception:
        logging.getLogger("relaunch").exception("no dead man's switch is requested any more")


async def _renew(renewal: Renewal, worker: Worker) -> None:
    """Take new certificates. An error ends that, as `doctor` shows in time, not the worker."""
    try:
        await renewal.run(worker)
    except Exception:
        logging.getLogger("relaunch").exception("replaced certificates are not taken any more")


def _make_background_tasks(
    client: Client, fleets: WorkerFleets
) -> Iterator[Coroutine[Any, Any, None]]:
    """Yield the background tasks for ECS fleets, which run beside the worker.

    They receive task events, write quarantines and write the tables of old dashboards.
    """
    names = [name for name, spec in fleets.specs.items() if spec.backend == "ecs"]
    if not names:
        return
    from relaunch.activities.mirror import MirrorLoop
    from relaunch.backends.ecs.backend import EcsBackend

    backends = {
        name: backend for name in names if isinstance(backend := fleets.backends[name], EcsBackend)
    }
    for name in backends:
        yield TaskEvents(client, partial(_get_event_queue, fleets, name)).run()
    yield MirrorLoop(client, {name: backend.marks() for name, backend in backends.items()}).run()


def _get_event_queue(fleets: WorkerFleets, name: str) -> EventQueue | None:
    from relaunch.backends.ecs.backend import EcsBackend

    backend = fleets.backends[name]
    return backend.events() if isinstance(backend, EcsBackend) else None


def _serve_metrics(address: str | None) -> Runtime:
    """Return the SDK's runtime, which serves metrics at an address, or none.

    Raises:
        ConfigError: it cannot listen there.
    """
    if address is None:
        return _make_runtime(TelemetryConfig(logging=forward_sdk_log()))
    metrics = PrometheusConfig(address, histogram_bucket_overrides=BUCKETS)
    try:
        return _make_runtime(TelemetryConfig(logging=forward_sdk_log(), metrics=metrics))
    except ValueError as error:
        raise ConfigError(
            f"setting metrics is {address!r}: {error}; expected an IP address of this machine and"
            " a port that no other worker has, such as 127.0.0.1:9464"
        ) from None


def _make_runtime(telemetry: TelemetryConfig) -> Runtime:
    """Return the SDK's runtime, with few threads, and let malloc have few pools.

    Both have as many as there are cores by default. The variable is not for agents and their ranks.
    """
    with contextlib.suppress(AttributeError):  # another libc than glibc
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)
    is_set = SDK_THREADS in os.environ
    os.environ.setdefault(SDK_THREADS, "2")
    try:
        return Runtime(telemetry=telemetry, worker_heartbeat_interval=HEARTBEAT_INTERVAL)
    finally:
        if not is_set:
            del os.environ[SDK_THREADS]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="relaunch-worker",
        description="Carry out jobs. Settings come from RELAUNCH_* and relaunch.toml.",
    )
    parser.add_argument(
        "--jobs", type=int, help="how many jobs to watch at once (each holds one activity slot)"
    )
    parser.add_argument("--state", type=Path, help="folder of local nodes and archived incidents")
    parser.add_argument(
        "--fleet", type=Path, action="append", help="a fleet file; may be given again"
    )
    parser.add_argument(
        "--show-settings", action="store_true", help="print every setting with its source, and end"
    )
    parser.add_argument("--no-build", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--near", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    overrides = {
        "jobs": arguments.jobs,
        "state": arguments.state,
        "fleets": tuple(arguments.fleet) if arguments.fleet else None,
    }
    try:
        settings = read_settings(**overrides)
        if arguments.show_settings:
            for name, value, source in describe_settings(
                settings, tuple(key for key, value in overrides.items() if value is not None)
            ):
                sys.stdout.write(f"{name:<18} {value:<40} {source}\n")
            if (traces := find_trace_endpoint()) is not None:
                sys.stdout.write(f"{'(traces)':<18} {traces[0]:<40} {traces[1]}\n")
            return 0
        cores.forgo()
        writer = start_log(sys.stderr, settings.log_level)
        try:
            set_runtime(_serve_metrics(settings.metrics))
            build = None if arguments.no_build else settings.build or build_id()
            asyncio.run(serve(settings, build, arguments.near))
        finally:
            writer.finish()
    except ConfigError as error:
        sys.stderr.write(f"relaunch-worker: {printable(str(error), MAX_LOG_LINE)}\n")
        return 2
    return 0
