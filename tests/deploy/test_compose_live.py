"""The workers' side of docker-compose.yml against a real Temporal server.

Its commands are run as they stand there, without containers.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import pytest_asyncio
from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from deploy.compose.namespace import prepare
from deploy.compose.polling import FRESH, judge, last_poll, read_start
from relaunch.temporal import RETENTION, SEARCH_ATTRIBUTES, data_converter, ensure_namespace
from tests.chaos.world import QUEUE, Process, World, eventually
from tests.deploy.compose import ROOT, SERVICES, double, seconds, typed
from tests.servers import start_dev_server

NAMESPACE = "fresh"
FLEET = "name: lab\nbackend: local\nnodes:\n  - {name: n1, address: 127.0.0.2}\n"
AT = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
STARTED = AT - timedelta(days=1)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Client]:
    environment = await start_dev_server(data_converter=data_converter())
    try:
        config = environment.client.service_client.config
        yield await Client.connect(
            config.target_host, namespace=NAMESPACE, data_converter=data_converter()
        )
    finally:
        await environment.shutdown()


@pytest.mark.parametrize(
    ("last", "start", "against"),
    [
        (AT, STARTED, None),
        (AT - FRESH, STARTED, None),
        (
            AT - FRESH - timedelta(seconds=1),
            STARTED,
            "the worker of this host last polled for workflow tasks 91 s ago, expected 90 or less",
        ),
        (None, STARTED, "no worker of this host polls for workflow tasks"),
        pytest.param(
            AT - timedelta(seconds=8),
            AT - timedelta(seconds=5),
            "the worker of this host has not polled for workflow tasks since its start 5 s ago",
            id="the last poll is its predecessor's",
        ),
    ],
)
def test_a_worker_is_judged_by_its_last_poll(
    last: datetime | None, start: datetime, against: str | None
) -> None:
    assert judge(last, AT, start) == against


def test_a_container_begins_with_its_first_process() -> None:
    """Any process stands for it here."""
    before = datetime.now(UTC)
    with subprocess.Popen(["sleep", "1000"]) as child:
        after = datetime.now(UTC)
        try:
            tick = timedelta(seconds=0.1)  # the kernel counts in hundredths
            assert before - tick <= read_start(child.pid) <= after + tick
            assert read_start() < before
        finally:
            child.kill()


@pytest.mark.long
async def test_a_namespace_is_set_up_once_and_its_worker_seen_to_poll(
    server: Client, tmp_path: Path
) -> None:
    with pytest.raises(RPCError) as unknown:
        await ensure_namespace(server)
    assert unknown.value.status == RPCStatusCode.NOT_FOUND, (
        "what a server says that does not know it yet: `prepare` asks again"
    )
    assert await prepare(server) == "registered"
    assert await prepare(server) == "there already"
    described = await server.workflow_service.describe_namespace(
        DescribeNamespaceRequest(namespace=NAMESPACE)
    )
    assert described.config.workflow_execution_retention_ttl.ToTimedelta() == RETENTION
    listed = await server.operator_service.list_search_attributes(
        ListSearchAttributesRequest(namespace=NAMESPACE)
    )
    assert set(SEARCH_ATTRIBUTES) <= set(listed.custom_attributes)

    environment = {
        **{
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("RELAUNCH_", "TEMPORAL_"))
        },
        **double(tmp_path / "bin", "python", f'exec {shlex.quote(sys.executable)} "$@"'),
        "TEMPORAL_ADDRESS": server.service_client.config.target_host,
        "TEMPORAL_NAMESPACE": NAMESPACE,
        "RELAUNCH_STATE": str(tmp_path / "state"),
    }
    check = SERVICES["worker-a"]["healthcheck"]["test"][1:]
    said = tmp_path / "check.log"

    async def healthy() -> int | None:
        running = Process("check", check, environment, said)
        await running.start()
        return await asyncio.wait_for(running.running.wait(), 120) if running.running else None

    (tmp_path / "fleets").mkdir()
    (tmp_path / "fleets" / "lab.yaml").write_text(FLEET)
    command = [typed(word) for word in SERVICES["worker-a"]["command"]]
    command[2] = command[2].replace("/etc/relaunch/fleets", shlex.quote(str(tmp_path / "fleets")))
    worker = Process("worker", command, environment, tmp_path / "worker.log")
    assert await healthy() == 1
    await worker.start()
    try:
        here = socket.gethostname()
        await eventually(lambda: last_poll(server, QUEUE, here), "the worker is not seen to poll")
        assert await healthy() == 0, said.read_text()
        assert await last_poll(server, QUEUE, "another-host") is None
        assert (tmp_path / "state" / "archive").is_dir()  # which the documented backup reads
    finally:
        begun = time.monotonic()
        await worker.end(signal.SIGTERM)
    assert time.monotonic() - begun < seconds(SERVICES["worker-a"]["stop_grace_period"]) / 2
    assert said.read_text().splitlines() == [
        "polling.py: no worker of this host polls for workflow tasks",
        "polling",
    ]


@pytest.mark.long
async def test_one_of_two_workers_killed_leaves_recovery_to_the_other(
    tmp_path: Path,
) -> None:
    async with World(tmp_path / "world", 7, answer_within=5.0) as world:
        other = Process(
            "other worker",
            [sys.executable, str(ROOT / "worker.py")],
            world.environment,
            tmp_path / "other.log",
        )
        await other.start()
        try:
            for killed in (world.worker, other):
                job = await world.submit()
                await job.until_phase("RUNNING", generation=1)
                await job.until_watched()
                await killed.end()
                os.kill(job.rank_pids()[0], signal.SIGKILL)
                await job.until_phase("RUNNING", generation=2)
                await job.until_steps()
                assert (await job.state()).generation == 2, "one fault, one recovery"
                await killed.start()
                await job.signal("cancel")
                await job.until_phase("CANCELLED")
        finally:
            await other.end()
