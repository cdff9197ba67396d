"""The controller goes away, by itself, by force or by an upgrade.

Training goes on, and no part of a budget is spent.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from temporalio.api.enums.v1 import EventType

from relaunch.activities.running_watches import RunningWatches
from relaunch.agent.state import read_boot_id
from relaunch.backends.local import cut, heal
from tests.chaos.checks import violations
from tests.chaos.rounds import KILLED, NOTHING, Expected
from tests.chaos.world import (
    ROOT,
    Job,
    Process,
    World,
    chaos_policy,
    environments,
    eventually,
)
from tests.payloads import read_failure

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

STICKY_TIMEOUT = 10.0
"""Seconds, as `relaunch.worker` has it."""
LONG = 6.0
"""Seconds: longer than lease and `fence_after` together, and than a step without a hang."""
IMPATIENT = chaos_policy(hang={"after": "4s", "first_step": "30s"})


async def finish(job: Job, expected: Expected | None = None) -> None:
    await job.until_steps()
    job.let_end()
    await job.until_phase("SUCCEEDED")
    assert await violations(job, expected or Expected((NOTHING,))) == []
    await job.world.tidy(job)


async def trained(job: Job) -> None:
    await job.until_phase("RUNNING")
    await job.until_watched()


@pytest.mark.long
async def test_a_worker_that_is_asked_to_end_relaunches_nothing(
    world: World,
) -> None:
    job = await world.submit()
    await trained(job)
    began = time.monotonic()
    assert await world.worker.end(signal.SIGTERM) == 0
    assert time.monotonic() - began < 10
    pids = job.rank_pids()
    await world.worker.start()
    # A worker renews leases again: without it the ranks would ask their peers, and no watch would
    # see a fault.
    await job.until_watched()
    assert job.rank_pids() == pids
    await finish(job)


async def test_s2_4_s5_1_ranks_and_counts_outlive_a_killed_worker(
    world: World,
) -> None:
    """It is away for longer than the lease. A restart that was spent before is spent after it."""
    gang = await world.submit(nodes=2, policy=IMPATIENT)
    single = await world.submit(nodes=1, policy=IMPATIENT)
    await trained(gang)
    await trained(single)
    os.kill(gang.rank_pids("n1")[0], signal.SIGKILL)
    await gang.until_phase("RUNNING", generation=2)
    await gang.until_watched()
    tries = (await gang.state()).tries
    assert [(str(one.cause), str(one.strategy), one.spent) for one in tries] == [*KILLED]
    await gang.until_steps()
    await world.worker.end(signal.SIGKILL)
    steps = gang.step(), single.step()
    await asyncio.sleep(LONG)
    for job, before in zip((gang, single), steps, strict=True):
        assert (job.step() or 0) > (before or 0) + 25, (
            f"{job.name} did not train while the controller was away"
        )
    await world.worker.start()
    await gang.until_watched()
    await single.until_watched()
    assert (await gang.state()).tries == tries
    single.let_end()
    await single.until_phase("SUCCEEDED")
    assert await violations(single, Expected((NOTHING,))) == []
    await finish(gang, Expected((KILLED,)))


@pytest.mark.long
async def test_a_watch_without_news_stays_with_its_worker(world: World) -> None:
    times = {"lease": "9s", "fence_after": "9s", "heartbeat": "1s"}
    logged = len(world.worker.log.read_text())
    job = await world.submit(nodes=1, policy=chaos_policy(times))
    await trained(job)
    began = time.monotonic()

    async def is_longer_than_the_sdk_waits() -> bool:
        return time.monotonic() - began > 9 + 5 + 3

    await eventually(is_longer_than_the_sdk_waits, "time passes")
    # That the watch was given to another attempt may be the machine's doing; that the SDK takes it
    # for stuck, because it sees no heartbeats, is ours. The server is not told of that.
    assert "Activity cancelled" not in world.worker.log.read_text()[logged:]
    await finish(job)


@pytest.mark.long  # `make test` kills the worker of the demo
@pytest.mark.parametrize("beside", [False, True])
async def test_a_killed_worker_is_followed_without_a_timeout(world: World, beside: bool) -> None:
    job = await world.submit(nodes=1, policy=chaos_policy({"lease": "60s", "fence_after": "60s"}))
    await trained(job)
    follower = world.worker
    if beside:  # it lives already when the first one is killed
        command, environment = world.worker._command, world.worker._environment
        follower = Process("second worker", command, environment, world.folder / "second.log")
        world.others.append(follower)
        await follower.start()
    await world.worker.end()
    if not beside:
        await world.worker.start()

    async def is_taken_over() -> bool:
        description = await world.client.get_workflow_handle(f"job/{job.name}").describe()
        (watch,) = description.raw_description.pending_activities
        if watch.attempt == 1 or not watch.HasField("last_heartbeat_time"):
            return False
        # not "activity Heartbeat timeout": by default that comes after half a minute
        failure = read_failure(watch.last_failure)
        assert failure.startswith("the worker that watched was killed")
        return watch.attempt == 2

    await eventually(is_taken_over, "the watch is taken over")

    async def is_logged() -> bool:
        return "took over 1 watch of killed workers" in follower.log.read_text()

    await eventually(is_logged, "the worker logs that it took over")
    if beside:
        await follower.end()
        await world.worker.start()
    await finish(job)


@pytest.mark.long
@pytest.mark.parametrize("start", ["before", "at once", "after a heartbeat timeout"])
async def test_a_fault_after_a_worker_was_killed_waits_for_no_timeout(
    world: World, start: str
) -> None:
    job = await world.submit(nodes=1)
    await trained(job)
    (pid,) = job.rank_pids()
    second = Process(
        "second worker",
        world.worker._command,
        world.worker._environment,
        world.folder / f"after-{start.replace(' ', '-')}.log",
    )
    world.others.append(second)
    if start == "before":
        await second.start()
    handle = world.client.get_workflow_handle(f"job/{job.name}")
    await handle.query("state")  # the server has just seen the worker, and keeps tasks for it
    await world.worker.end()
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()

    async def has_timed_out() -> bool:
        (watch,) = (await handle.describe()).raw_description.pending_activities
        return watch.attempt == 2

    if start == "after a heartbeat timeout":
        await eventually(has_timed_out, "the server misses the watch", pause=0.05)
        # As the second worker does, which could have begun the next attempt before it.
        watches = RunningWatches(world.folder / "state" / "watches")
        assert await watches.take_over(world.client) == 0
    if start != "before":
        await second.start()

    async def serves() -> bool:
        return "serves task queue" in second.log.read_text()

    await eventually(serves, "the second worker starts", pause=0.05)
    took = time.monotonic() - killed
    await job.until_phase("RUNNING", generation=2)
    timed_out = [
        event
        async for event in handle.fetch_history_events()
        if event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_TIMED_OUT
    ]
    if took < STICKY_TIMEOUT:  # later, the server knows by itself that the first one is gone
        assert not timed_out
    await second.end()
    await world.worker.start()
    await finish(job, Expected((KILLED,)))


@pytest.mark.long
async def test_s2_4_s5_1_a_server_away_beyond_the_lease_costs_nothing(
    world: World,
) -> None:
    job = await world.submit(policy=IMPATIENT)
    await trained(job)
    await world.server.end()
    await asyncio.sleep(LONG)
    await world.server.start()
    await job.until_watched()
    await finish(job)


@pytest.mark.long
async def test_s2_7_s2_8_a_lost_node_goes_on_when_it_is_heard_again(
    world: World,
) -> None:
    job = await world.submit(nodes=1)
    await trained(job)
    pids = job.rank_pids()
    cut(world.node("n1"))
    await job.until_phase("NODE_LOST")
    before = job.step() or 0
    await asyncio.sleep(LONG)  # beyond lease and fence: a job on one node never fences

    async def has_gone_on() -> bool:
        return (job.step() or 0) > before + 20

    await eventually(has_gone_on, "its ranks go on while the node is lost")
    heal(world.node("n1"))
    await job.until_phase("RUNNING")
    assert job.rank_pids() == pids
    (incident,) = await job.incidents()
    assert str(incident.cause) == "NODE_LOST"
    assert incident.outcome is not None and "came back" in incident.outcome
    await finish(job)


@pytest.mark.long
async def test_s2_7_a_job_asks_while_its_only_node_is_lost(
    world: World,
) -> None:
    job = await world.submit(nodes=1, policy=chaos_policy({"ask_after": "2s"}))
    await trained(job)
    cut(world.node("n1"))
    await job.until_phase("WAITING_FOR_PERSON")
    heal(world.node("n1"))
    await job.until_phase("RUNNING")
    await finish(job)


async def test_s2_5_records_of_running_ranks_name_pids_and_boot(
    world: World,
) -> None:
    job = await world.submit()
    await trained(job)
    for node in ("n1", "n2"):
        folder = job.generation_folder(node)
        assert folder is not None
        shim = job.agent_pid(node, "shim")
        assert shim is not None
        record = json.loads((folder / "shim.json").read_text())
        assert (record["pid"], record["boot_id"]) == (shim, read_boot_id(world.node(node)))
        assert str(job.rank_pids(node)[0]) in (folder / "started.json").read_text()
    await finish(job)


OUT_OF_MEMORY = """
import os, sys
generation = os.environ["RELAUNCH_GENERATION"]
with open(sys.argv[1], "a") as file:
    file.write(generation)
if generation == "1":
    raise SystemExit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
"""


@pytest.mark.long
async def test_a_worker_killed_while_a_node_is_asked_restarts_once(world: World) -> None:
    """The node is asked which foreign processes use the job's GPUs."""
    launched = world.folder / "launched-once"
    command = [sys.executable, "-S", "-c", OUT_OF_MEMORY, str(launched)]
    job = await world.submit(nodes=1, command=command, policy=chaos_policy(max_restarts=5))
    handle = world.client.get_workflow_handle(f"job/{job.name}")

    async def is_asked() -> bool:
        pending = (await handle.describe()).raw_description.pending_activities
        return any(one.activity_type.name == "find_foreign_processes" for one in pending)

    await eventually(is_asked, "a node is asked", pause=0.0)
    await world.worker.end(signal.SIGKILL)
    await world.worker.start()
    await job.until_phase("SUCCEEDED")
    assert launched.read_text() == "12"
    scheduled = [
        event.activity_task_scheduled_event_attributes.activity_type.name
        for event in (await handle.fetch_history()).events
    ]
    assert (scheduled.count("find_foreign_processes"), scheduled.count("launch_ranks")) == (1, 2)
    await world.tidy(job)


@pytest.mark.long
async def test_workers_and_agents_leave_no_core_and_ranks_may(world: World) -> None:
    def limit(pid: int | None) -> int:
        assert pid is not None
        return resource.prlimit(pid, resource.RLIMIT_CORE)[0]

    given, hard = resource.getrlimit(resource.RLIMIT_CORE)
    await world.worker.end(signal.SIGTERM)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    try:
        await world.worker.start()
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (given, hard))
    job = await world.submit()
    await trained(job)
    agents = [*world.sessions("n1"), job.agent_pid("n1", "shim"), job.agent_pid("n1", "supervisor")]
    assert {limit(pid) for pid in [world.worker.pid, *agents]} == {1 if hard else 0}
    assert [limit(pid) for pid in job.rank_pids()] == [hard, hard]
    await world.worker.end(signal.SIGTERM)
    await world.worker.start()
    await finish(job)


@pytest.mark.long
async def test_a_new_worker_watches_old_supervisors_with_a_new_agent(
    world: World, tmp_path: Path
) -> None:
    job = await world.submit()
    await trained(job)
    pids = job.rank_pids()
    checkout = tmp_path / "upgraded"
    checkout.mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copy(path, checkout)
    for name in ("activities", "relaunch", "workflows"):
        shutil.copytree(
            ROOT / name,
            checkout / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    with (checkout / "relaunch" / "agent" / "__init__.py").open("a") as file:
        file.write('\nUPGRADED = "another agent"\n')
    (agent,) = agents(world)
    old, world.worker = (
        world.worker,
        Process(
            "worker",
            [sys.executable, str(checkout / "worker.py")],
            world.environment,
            world.folder / "upgraded.log",
        ),
    )
    assert await old.end(signal.SIGTERM) == 0
    await world.worker.start()
    try:
        await job.until_watched()
        (new,) = set(agents(world)) - {agent}
        assert job.rank_pids() == pids
        assert programs(job, "n1") == {agent}
        os.kill(pids[0], signal.SIGKILL)
        await job.until_phase("RUNNING", generation=2)
        await job.until_steps()
        assert programs(job, "n1") == {new}
        await finish(job, Expected((KILLED,)))
    finally:
        await world.worker.end()
        world.worker = old
        await world.worker.start()


def agents(world: World) -> list[str]:
    return sorted(path.name for path in (world.folder / "state" / "agent").glob("*.pyz"))


def programs(job: Job, node: str) -> set[str]:
    """Which agent the shim and the supervisor of a node's newest generation run."""
    pids = {job.agent_pid(node, "shim"), job.agent_pid(node, "supervisor")} - {None}
    lines = {
        pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        for pid, _ in environments()
        if pid in pids
    }
    return {
        Path(os.fsdecode(word)).name
        for words in lines.values()
        for word in words
        if word.endswith(b".pyz")
    }
