"""Jobs on ECS, real but for AWS, which tests/doubles/aws plays.

A real server, worker.py as a process, containers as processes.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from relaunch.activities.gang import CASCADE_GATHER_TIMEOUT_S
from relaunch.backends.ecs import reboots
from relaunch.messages.jobs import NodeRepairResult
from relaunch.spec.policy import resolve
from tests.chaos.ecs_places import LOGGED, NODE, TRAINER, EcsPlaces
from tests.chaos.world import FLEET, TIMES, Job, World, eventually
from tests.doubles.aws import LOST, RESET
from tests.doubles.aws.faults import Kind
from tests.doubles.install import build_nvml, install_nvml, install_tool, tell_nvml

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]
SAMPLES = Path(__file__).parents[1] / "recovery" / "samples" / "dcgm" / "synthetic"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    async with World(
        tmp_path_factory.mktemp("ecs") / "world", 119, nodes=2, spares=1, gpus=1, backend="ecs"
    ) as made:
        yield made


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_nvml(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def aws(world: World) -> EcsPlaces:
    assert isinstance(world.places, EcsPlaces)
    return world.places


def policy(**changes: Any) -> Any:
    return resolve({**changes, "timeouts": TIMES})


async def ended(job: Job, phase: str) -> None:
    await job.until_phase(phase)


async def vouch(world: World) -> None:
    """For the nodes: the fleet would suspect one on which the ranks of several jobs failed."""
    for name in world.names:
        await world.client.get_workflow_handle(f"fleet/{FLEET}").signal(
            "release", {"node": name, "by": "the test"}
        )


def ran(aws: EcsPlaces, job: Job) -> list[str]:
    """Of every task of a job, its last status."""
    return [
        task["lastStatus"]
        for task in aws.aws.tasks(TRAINER)
        if f"/{job.name}/" in task["startedBy"]
    ]


def places(aws: EcsPlaces, job: Job, status: str | None = None) -> dict[int, list[str]]:
    """Return where the tasks of each generation were placed, or those with that last status."""
    names = {instance.arn: name for name, instance in aws.instances.items()}
    found: dict[int, list[str]] = {}
    for task in (*aws.aws.tasks(TRAINER, status), *aws.aws.tasks(LOGGED, status)):
        by = task["startedBy"]
        if f"/{job.name}/" in by:
            nodes = found.setdefault(int(by.rpartition("/")[2]), [])
            nodes.append(names[task["containerInstanceArn"]])
    return {generation: sorted(nodes) for generation, nodes in sorted(found.items())}


def started(job: Job) -> dict[int, list[str]]:
    """Return where the ranks of each generation say that they ran."""
    found: dict[int, list[str]] = {}
    for start in job.starts():
        found.setdefault(int(start["token"].rpartition("/")[2]), []).append(start["node"])
    return {generation: sorted(nodes) for generation, nodes in sorted(found.items())}


@pytest.mark.long
async def test_s1_2_a_rank_that_fails_has_all_ranks_relaunched(
    world: World, aws: EcsPlaces
) -> None:
    # The rank that does not fail would wait for the other for ever: it ends because it is stopped.
    job = await world.submit(rank=("--stand-still",))
    await job.until_steps()
    (job.folder / "fail.1").write_text("CUDA error: an illegal memory access was encountered")
    await job.until_phase("RUNNING", generation=2)
    await job.until_steps()
    both = ["n1", "n2"]
    assert started(job) == places(aws, job) == {1: both, 2: both}
    assert places(aws, job, "RUNNING") == {2: both}
    assert job.lines("violations") == []
    job.let_end()
    await ended(job, "SUCCEEDED")
    await world.tidy(job)
    await vouch(world)


def examined_by(
    aws: EcsPlaces, name: str, nvml: Path, sample: str, exit_code: int = 0, **told: Any
) -> None:
    """Have dcgmi on a node say so, from now on."""
    install_nvml(aws.state(name) / "lib", nvml, "driver 570\ngpus 1\n")
    said = (SAMPLES / sample).read_text()
    install_tool(aws.state(name) / "bin", "dcgmi", stdout=said, exit_code=exit_code, **told)


async def shown(aws: EcsPlaces, table: str, key: str, **expected: str) -> None:
    """Wait until a row of a table has these values."""

    async def has_them() -> bool:
        row = aws.rows(table).get(key, {})
        return {name: str(row.get(name)) for name in expected} == expected

    await eventually(has_them, f"{table} does not show {expected} of {key}")


@pytest.mark.long  # its parts: tests/backends/test_ecs_….py
async def test_s1_3_s1_5_s1_6_s1_8_s1_10_ecs_reboot_once_fault_to_end(
    world: World, aws: EcsPlaces, nvml: Path
) -> None:
    for name in world.names:
        examined_by(aws, name, nvml, "v4_r1_pass_8gpu.json")
    go = world.folder / "n2-may-be-judged"
    faulty = "v4_r2_gpu6_faulty_memory_isolate.json"
    examined_by(aws, "n2", nvml, faulty, 226, until=str(go))
    # It terminates an instance that goes down and is not in Standby.
    group = aws.aws.add_group("gpus", [aws.instances[name].ec2_id for name in world.names])
    boots = {name: aws.instances[name].boots for name in world.names}
    aws.instances[
        "n2"
    ].machine.connects = False  # after its reboot, until relaunch has seen it away
    # Rank 0 waits for its peer, as in a collective. Of two containers that end at once without a
    # word in ECS, the one that seems to have ended first is examined, and that may be either.
    job = await world.submit(
        gpus_per_node=1,
        policy=policy(extends="ecs-reboot-once", dcgm_level=1),
        rank=("--stand-still",),
    )
    await job.until_phase("RUNNING", generation=1)
    await job.until_steps()
    await shown(aws, "ecs_job", job.name, job_status="IN_PROGRESS", retry="0")
    await shown(aws, "ecs_node", "n2", node_status="IN_PROGRESS")
    (job.folder / "fail.1").write_text("CUDA error: uncorrectable ECC error")
    await job.until_phase("EXAMINING")
    # The tables are written every few seconds, so each state is held until it was shown.
    await shown(aws, "ecs_job", job.name, job_status="PENDING_HEALTHCHECK", retry="0")
    await shown(aws, "ecs-job-sub", f"{job.name}_1", status="STOPPED", run_time="1")
    go.touch()

    async def rebooted() -> bool:
        return aws.instances["n2"].boots > boots["n2"]

    async def seen_away() -> bool:
        return any(entry.startswith(reboots.JournalPhase.DOWN) for entry in aws.repair_tags("n2"))

    await job.until(rebooted, "n2 is not rebooted", 120)
    await job.until(seen_away, "n2 is not seen to be away", 120)
    await shown(aws, "ecs_job", job.name, job_status="PENDING_RESTART", retry="0")
    await shown(aws, "ecs_node", "n2", node_status="REBOOTING")
    assert group.states[aws.instances["n2"].ec2_id] == "Standby"
    registered = aws.instances["n2"].arn.rpartition("/")[2]
    await shown(aws, "ecs_container_instance", registered, status="REBOOTING", node_name="n2")
    examined_by(aws, "n2", nvml, "v4_r1_pass_8gpu.json")
    aws.instances["n2"].connect()
    await job.until_phase("RUNNING", generation=2, patience=300)
    await job.until_steps()
    assert (set(group.states.values()), group.desired) == ({"InService"}, len(world.names))
    assert {name: aws.instances[name].boots - boots[name] for name in world.names} == {
        "n1": 0,
        "n2": 1,
        "n3": 0,
    }
    both = ["n1", "n2"]
    assert started(job) == places(aws, job) == {1: both, 2: both}
    assert job.lines("violations") == []
    await shown(aws, "ecs_job", job.name, job_status="IN_PROGRESS", retry="1")
    await shown(aws, "ecs_node", "n2", node_status="IN_PROGRESS")
    await shown(aws, "ecs-job-sub", f"{job.name}_1", status="inprogress", run_time="2")
    job.let_end()
    await ended(job, "SUCCEEDED")
    await shown(aws, "ecs_job", job.name, job_status="COMPLETE", retry="1")
    await shown(aws, "ecs_node", "n2", node_status="AVAILABLE")
    await shown(aws, "ecs-job-sub", f"{job.name}_0", status="complete", job_id=job.name)
    await shown(aws, "ecs_container_instance", registered, status="AVAILABLE")
    assert aws.notices() == []
    await world.tidy(job)
    await vouch(world)


@pytest.mark.long
async def test_s1_3_the_failing_ranks_node_is_examined_after_an_echo(
    world: World, aws: EcsPlaces, nvml: Path
) -> None:
    for name in world.names:
        examined_by(aws, name, nvml, "v4_r1_pass_8gpu.json")
    job = await world.submit(
        gpus_per_node=1,
        policy=policy(extends="ecs-reboot-once", dcgm_level=1),
        rank=("--linger",),
        ecs={"task_definition": LOGGED},
    )
    await job.until_phase("RUNNING", generation=1)
    await job.until_steps()
    (job.folder / "fail.1").write_text("KeyError: 'lr'")
    names = {instance.arn: name for name, instance in aws.instances.items()}
    first = next(
        task["taskArn"].rpartition("/")[2]
        for task in aws.aws.tasks(LOGGED)
        if f"/{job.name}/" in task["startedBy"] and names[task["containerInstanceArn"]] == "n1"
    )

    async def is_read() -> bool:
        reads = [call.request for call in aws.aws.requests if call.operation == "GetLogEvents"]
        return any(first in str(request.get("logStreamName")) for request in reads)

    await eventually(is_read, "what rank 0 printed at its end is not read")
    # Longer than a backend is waited for that reports all exits at once.
    await asyncio.sleep(CASCADE_GATHER_TIMEOUT_S + 1)
    (job.folder / "end.1").touch()  # only now is there more than the echo
    await ended(job, "FAILED")
    (incident,) = await job.incidents()
    assert (incident.nodes, incident.ranks) == (("n2",), (1,)), incident.reason
    examined = [
        names[task["containerInstanceArn"]]
        for task in aws.aws.tasks(NODE)
        if task["startedBy"].startswith("relaunch-node/diagnose") and job.name in str(task)
    ]
    assert examined == ["n2"]
    await world.tidy(job)
    await vouch(world)


async def test_s1_5_s1_7_a_fault_on_healthy_nodes_fails_and_notifies(
    world: World, aws: EcsPlaces, nvml: Path
) -> None:
    for name in world.names:
        examined_by(aws, name, nvml, "v4_r1_pass_8gpu.json")
    job = await world.submit(
        gpus_per_node=1, policy=policy(extends="ecs-reboot-once", dcgm_level=1)
    )
    await job.until_phase("RUNNING", generation=1)
    await job.until_steps()
    (job.folder / "fail.1").write_text("KeyError: 'lr'")
    await ended(job, "FAILED")

    async def is_notified() -> bool:
        return any(job.name in notice["Subject"] for notice in aws.notices())

    await eventually(is_notified, "no message is sent", 20)
    await world.tidy(job)
    await vouch(world)


@pytest.mark.long
async def test_s1_5_no_person_is_asked_for_a_reset_on_ecs(
    world: World, aws: EcsPlaces, nvml: Path
) -> None:
    for name in world.names:
        examined_by(aws, name, nvml, "v4_r1_pass_8gpu.json")
    tell_nvml(aws.state("n2") / "lib", "driver 570\ngpus 1\nremapped 0 0 1 1 0\n")
    world.repairs = "ask"
    world.write_fleet()
    try:
        job = await world.submit(policy=policy(), ecs={"task_definition": LOGGED})
        await job.until_phase("RUNNING", generation=1)
        await job.until_steps()
        (job.folder / "fail.1").write_text("CUDA error: uncorrectable ECC error encountered")
        await job.until_phase("RUNNING", generation=2)
        await job.until_steps()
        assert places(aws, job) == {1: ["n1", "n2"], 2: ["n1", "n3"]}
        incident = (await job.state()).incident
        assert incident is not None
        assert [one.strategy for one in incident.decisions if one.strategy] == [
            "RESET_GPU",
            "REPLACE_NODE",
        ]
        refused = await read_repair(job, "n2")
        assert refused.reason.startswith("cannot reset the GPUs of n2: ")
        await deny(world, "n2", "REBOOT_NODE")  # which the fleet asks for, without the job
    finally:
        world.repairs = "act"
        world.write_fleet()
    job.let_end()
    await ended(job, "SUCCEEDED")
    await world.tidy(job)
    await vouch(world)


async def deny(world: World, node: str, strategy: str) -> None:
    """Wait until the fleet's repair of a node asks for approval of this strategy, and deny it."""
    repair = world.client.get_workflow_handle(f"repair/{FLEET}/{node}")

    async def asks() -> bool:
        state = await repair.query("state")
        return bool(state) and (state["strategy"], state["stage"]) == (strategy, "ASKING")

    await eventually(asks, f"{strategy} of {node} is not asked for")
    await repair.execute_update("answer", {"decision": "deny", "by": "the test"})
    await repair.result()


async def read_repair(job: Job, node: str) -> NodeRepairResult:
    """Return the result of the repair of a node that a job ordered itself."""
    client, id = job.world.client, f"repair/{FLEET}/{node}"

    async def find_run() -> str | None:
        runs = [run async for run in client.list_workflows(f"WorkflowId = '{id}'")]
        return next((run.run_id for run in runs if run.parent_id == f"job/{job.name}"), None)

    run_id = await eventually(find_run, f"{job.name} has ordered no repair of {node}")
    handle = client.get_workflow_handle(id, run_id=run_id, result_type=NodeRepairResult)
    result: NodeRepairResult = await handle.result()
    return result


@pytest.mark.long
async def test_s1_9_lost_doubled_and_reordered_events_change_nothing(
    world: World, aws: EcsPlaces
) -> None:
    job = await world.submit()
    await job.until_steps()
    for generation, word in ((2, "drop"), (3, "double"), (4, "reorder")):
        setattr(aws.aws.events, word, 50)
        (job.folder / "fail.1").write_text("boom")
        await job.until_phase("RUNNING", generation=generation)
        await job.until_steps()
        setattr(aws.aws.events, word, 0)
    state = await job.state()
    assert (state.generation, len(ran(aws, job)), job.lines("violations")) == (4, 8, [])
    job.let_end()
    await ended(job, "SUCCEEDED")
    await world.tidy(job)
    await vouch(world)


@pytest.mark.long
async def test_s1_1_a_task_that_a_person_stops_cancels_the_job(
    world: World, aws: EcsPlaces
) -> None:
    job = await world.submit()
    await job.until_steps()
    aws.reboot("n2")  # stops what runs there, as a person does
    await ended(job, "CANCELLED")
    assert "by a user" in (await job.look()).memo["reason"]
    assert "RUNNING" not in ran(aws, job)
    await world.tidy(job)
    await vouch(world)


class KillsAt:
    """Kills the worker as its n-th call to ECS is applied, or before."""

    def __init__(self, world: World, at: int) -> None:
        self._world, self._at = world, at
        self.calls = 0
        self.killed_at = ""

    def __call__(self, request: Any) -> bool:
        self.calls += 1
        if self.calls != self._at:
            return False
        os.kill(self._world.worker.pid, signal.SIGKILL)
        self.killed_at = str(sorted(request))
        return True


async def recover_from(world: World, aws: EcsPlaces, at: int, kind: Kind) -> bool:
    """Fail a rank, and kill the worker at its `at`-th call to ECS after that.

    Returns False where it made fewer calls until ranks ran again.
    """
    job = await world.submit()
    await job.until_steps()
    kills = KillsAt(world, at)
    fault = aws.aws.faults.add("ecs.*", kind, when=kills)
    try:
        (job.folder / "fail.1").write_text("boom")

        async def over() -> bool:
            return bool(kills.killed_at) or await job.phase() == ("RUNNING", 2)

        await eventually(over, "neither killed nor launched again")
    finally:
        aws.aws.faults.remove(fault)
    if kills.killed_at:
        await world.worker.end()
        await world.worker.start()
    await job.until_phase("RUNNING", generation=2)
    await job.until_steps()
    # Each task that was launched has been listed by now: an unknown one would have been there for
    # as long.
    running = [
        task
        for task in aws.aws.tasks(TRAINER)
        if f"/{job.name}/" in task["startedBy"] and task["lastStatus"] != "STOPPED"
    ]
    state = await job.state()
    assert len({task["containerInstanceArn"] for task in running}) == len(running) == 2, (
        f"killed at call {at} ({kind.name})"
    )
    assert {task["startedBy"].rpartition("/")[2] for task in running} == {str(state.generation)}
    assert job.lines("violations") == [] and state.restarts_spent <= 1
    job.let_end()
    await ended(job, "SUCCEEDED")
    await world.tidy(job)
    await vouch(world)
    return bool(kills.killed_at)


@pytest.mark.long
@pytest.mark.parametrize(("at", "kind"), [(3, LOST), (6, RESET)])
async def test_s1_2_a_worker_killed_between_calls_doubles_no_task(
    world: World, aws: EcsPlaces, at: int, kind: Kind
) -> None:
    assert await recover_from(world, aws, at, kind)


@pytest.mark.long
@pytest.mark.timeout(7200)  # a recovery for each of some twenty calls
@pytest.mark.parametrize("kind", [LOST, RESET], ids=["applied", "not applied"])
async def test_s1_2_a_worker_may_be_killed_at_any_call_of_a_recovery(
    world: World, aws: EcsPlaces, kind: Kind
) -> None:
    calls = 1
    while await recover_from(world, aws, calls, kind):
        calls += 1
    assert calls > 10, "a recovery takes more calls than that"
