"""`relaunch up` with two workers, one of which is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import urllib.request
from pathlib import Path

import pytest
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import Client

from relaunch.messages.jobs import JobResult
from relaunch.temporal import data_converter, find_running_up
from tests.chaos.world import Process, eventually, free_port
from tests.console.commands import STARTER, bare_environment, starter
from tests.payloads import read_failure

TIMEOUT_S = 120.0
JOB = """\
name: j
command: [sh, -c, 'while [ ! -e end ]; do sleep 0.2; done']
"""


def read_metrics(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return bool(answer.read())
    except OSError:
        return False


@pytest.mark.long
async def test_of_two_workers_one_is_killed_and_the_other_goes_on(tmp_path: Path) -> None:
    port, log, state = free_port(), tmp_path / "up.log", tmp_path / ".relaunch"
    words = [sys.executable, STARTER, "up", "--state", str(state), "--workers", "2"]
    words += ["--port", "0", "--ui-port", "0"]
    variables = bare_environment({"RELAUNCH_METRICS": f"127.0.0.1:{port}"})
    up = Process("up", words, variables, log)
    await up.start()
    try:

        async def find_address() -> str | None:
            found = find_running_up(state)
            return found.address if found is not None else None

        address = await eventually(find_address, "up does not start")
        client = await Client.connect(address, data_converter=data_converter())
        (tmp_path / "job.yaml").write_text(JOB)
        submitted = await starter(tmp_path, "submit", "job.yaml")
        assert submitted.code == 0, submitted
        job = client.get_workflow_handle("job/j", result_type=JobResult)

        async def find_watch() -> PendingActivityInfo | None:
            pending = (await job.describe()).raw_description.pending_activities
            watches = [one for one in pending if one.activity_type.name == "watch_ranks"]
            return next((one for one in watches if one.HasField("last_heartbeat_time")), None)

        watch = await eventually(find_watch, "no worker watches")

        async def have_metrics() -> bool:
            return all([await asyncio.to_thread(read_metrics, port + n) for n in (0, 1)])

        await eventually(have_metrics, "a worker has no metrics")
        os.kill(int(watch.last_worker_identity.partition("@")[0]), signal.SIGKILL)

        async def is_taken_over() -> PendingActivityInfo | None:
            now = await find_watch()
            return now if now is not None and now.attempt > watch.attempt else None

        after = await eventually(is_taken_over, "no other worker watches")
        failure = read_failure(after.last_failure)
        assert failure.startswith("the worker that watched was killed")
        (tmp_path / "end").touch()
        result = await asyncio.wait_for(job.result(), TIMEOUT_S)
        assert (result.phase, result.generation) == ("SUCCEEDED", 1)
    finally:
        await up.end(signal.SIGTERM)
    assert "2 workers started" in log.read_text()
