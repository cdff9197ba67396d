"""Jobs on nodes that are reached by SSH: a real server, a real worker, real SSH servers.

The product is not changed for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests import planted
from tests.chaos.checks import violations
from tests.chaos.places import SshPlaces
from tests.chaos.rounds import CUTS, KILLED, LOST, NOTHING, Expected
from tests.chaos.world import (
    FLEET,
    HANG_AFTER,
    RANK_PROGRAM,
    ROOT,
    TIMES,
    Job,
    World,
    chaos_policy,
    eventually,
)
from tests.e2e.test_nodes import starter

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

UNHURRIED = chaos_policy({"lost_after": "20s"})
"""A node that is away for some seconds is not lost yet."""
UNHASTY = {"hang": {"after": "12s", "first_step": "30s"}}
"""A broken connection that is silent is noticed later than one of this machine."""
LEASE_AND_FENCE = sum(float(TIMES[name].removesuffix("s")) for name in ("lease", "fence_after"))
"""Seconds after which a node without renewals and without a peer's word has ended its ranks."""
CONTROL, BOTH = CUTS["cut controller"], CUTS["cut both"]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Nodes on loopback addresses."""
    async with World(
        tmp_path_factory.mktemp("e2e") / "world", 123, spares=1, backend="ssh", answer_within=5.0
    ) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def apart(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Nodes with a control network and one for training; the worker has the first only."""
    async with World(
        tmp_path_factory.mktemp("e2e") / "apart",
        124,
        spares=1,
        backend="ssh",
        apart=True,
        answer_within=3.0,
    ) as made:
        yield made


@pytest.fixture(params=["apart", pytest.param("world", marks=pytest.mark.long)])
def lab(request: pytest.FixtureRequest) -> World:
    """Where the machine allows no networks, the cut is an sshd, or ranks, that stand still."""
    made: World = request.getfixturevalue(request.param)
    return made


async def trained(job: Job) -> list[int]:
    await job.until_phase("RUNNING")
    await job.until_watched()
    return sorted(job.rank_pids())


async def finish(job: Job, expected: Expected | None = None) -> None:
    await job.until_steps()
    job.let_end()
    await job.until_phase("SUCCEEDED")
    assert await violations(job, expected or Expected((NOTHING,))) == []


def hosts(world: World) -> SshPlaces:
    assert isinstance(world.places, SshPlaces)
    return world.places


def logins(world: World) -> list[int]:
    return [hosts(world).hosts[name].logins() for name in ("n1", "n2")]


async def started(world: World, *words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, str(ROOT / "starter.py"), *words,
        env={**world.environment, "RELAUNCH_NO_WARM": "1"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip


async def test_s2_1_a_job_over_ssh_on_two_nodes_survives_a_lost_rank(
    world: World,
) -> None:
    folder = world.folder / "jobs" / "cli"
    folder.mkdir(parents=True)
    file = world.folder / "job.yaml"
    command = [sys.executable, "-S", str(RANK_PROGRAM), str(folder)]
    policy = {"hang": {"after": HANG_AFTER, "first_step": "30s"}, "timeouts": TIMES}
    spec = {"name": "cli", "command": command, "nodes": 2, "fleet": FLEET, "policy": policy}
    file.write_text(json.dumps(planted.add_to(spec, world.folder)))
    status, text = await starter(world, "submit", str(file))
    assert status == 0, text
    job = Job(world, "cli", folder, "")
    following = await started(world, "follow", "cli")
    before = await trained(job)
    assert {line["node"] for line in job.starts()} == {"n1", "n2"}
    assert logins(world) == [1, 1], "one connection to each node is kept"
    os.kill(before[0], signal.SIGKILL)
    await job.until_phase("RUNNING", generation=2)
    assert not {*before} & {*job.rank_pids()}
    await finish(job, Expected((KILLED,)))
    said, _ = await following.communicate()
    planted.check("what follow prints", said)
    assert following.returncode == 0, said.decode()
    assert "SUCCEEDED" in said.decode()
    status, text = await starter(world, "show", "cli", "--json")
    shown = json.loads(text)
    assert (status, shown["phase"], shown["generation"], shown["incidents"]) == (
        0,
        "SUCCEEDED",
        2,
        1,
    )
    assert logins(world) == [1, 1]


@pytest.mark.long
async def test_s2_4_an_sshd_that_dies_under_a_job_stops_nothing(
    world: World,
) -> None:
    job = await world.submit(policy=UNHURRIED)
    ranks = await trained(job)
    host = hosts(world).hosts["n2"]
    host.kill()
    step = job.step() or 0
    await asyncio.sleep(LEASE_AND_FENCE + 0.5)
    await eventually(lambda: advanced(job, step + 40), "ranks do not outlive their node's sshd")
    assert (await job.phase(), sorted(job.rank_pids())) == (("RUNNING", 1), ranks)
    host.start()
    await eventually(lambda: connected(world, "n2"), "n2 is not watched again")
    assert (await job.phase(), sorted(job.rank_pids())) == (("RUNNING", 1), ranks)
    await finish(job)


async def connected(world: World, *nodes: str) -> bool:
    return all(len(world.sessions(node)) == 1 for node in nodes)


@pytest.mark.long
async def test_s2_4_a_killed_worker_leaves_the_ranks_to_the_next(
    world: World,
) -> None:
    job = await world.submit()
    ranks = await trained(job)
    before = logins(world)
    await world.worker.end(signal.SIGKILL)
    step = job.step() or 0
    await eventually(
        lambda: advanced(job, step + 20), "ranks do not outlive the worker that launched them"
    )
    await world.worker.start()
    await eventually(lambda: connected(world, "n1", "n2"), "the worker does not log in again")
    assert (await job.phase(), sorted(job.rank_pids())) == (("RUNNING", 1), ranks)
    await finish(job)
    assert logins(world) == [one + 1 for one in before]


@pytest_asyncio.fixture(loop_scope="module")
async def moving(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """As `apart`, for one test: a second machine takes the controller's place in it."""
    async with World(
        tmp_path_factory.mktemp("e2e") / "moving",
        125,
        spares=1,
        backend="ssh",
        apart=True,
        answer_within=3.0,
    ) as made:
        yield made


@pytest.mark.long
async def test_s2_4_another_machine_takes_over_from_a_dead_controller(
    moving: World,
) -> None:
    job = await moving.submit(policy=UNHURRIED)
    ranks = await trained(job)
    network = hosts(moving).network
    assert network is not None
    network.unplug_controller()
    await moving.worker.end(signal.SIGKILL)
    await moving.worker_elsewhere()
    await job.until_watched()
    assert (await job.phase(), sorted(job.rank_pids())) == (("RUNNING", 1), ranks)
    os.kill(ranks[0], signal.SIGKILL)
    await job.until_phase("RUNNING", generation=2)
    await finish(job, Expected((KILLED,)))


@pytest.mark.long
async def test_s2_4_a_worker_waking_after_a_takeover_changes_nothing(
    moving: World,
) -> None:
    job = await moving.submit(policy=UNHURRIED)
    ranks = await trained(job)
    os.kill(moving.worker.pid, signal.SIGSTOP)
    await moving.worker_elsewhere()
    await job.until_watched()
    assert (await job.phase(), sorted(job.rank_pids())) == (("RUNNING", 1), ranks)
    os.kill(ranks[0], signal.SIGKILL)
    await job.until_phase("RUNNING", generation=2)
    await job.until_watched()
    newer = sorted(job.rank_pids())
    os.kill(moving.worker.pid, signal.SIGCONT)
    await job.until_steps(60)
    assert (await job.phase(), sorted(job.rank_pids())) == (("RUNNING", 2), newer)
    await finish(job, Expected((KILLED,)))


@pytest.mark.long
async def test_s2_1_far_away_nodes_are_launched_watched_and_relaunched(
    tmp_path: Path,
) -> None:
    async with World(
        tmp_path / "far", 126, spares=1, backend="ssh", answer_within=5.0, delay=0.15
    ) as far:
        job = await far.submit(policy=UNHURRIED)
        ranks = await trained(job)
        os.kill(ranks[0], signal.SIGKILL)
        await job.until_phase("RUNNING", generation=2)
        await job.until_watched()
        hosts(far).hosts["n2"].kill()
        await job.until_phase("NODE_LOST", generation=2)
        hosts(far).hosts["n2"].start()
        await job.until_phase("RUNNING")
        await finish(job, Expected((KILLED, NOTHING)))


async def advanced(job: Job, step: int) -> bool:
    return (job.step() or 0) > step


@pytest.mark.long  # the contract of tests/backends reads logs on
async def test_output_of_ranks_is_read_from_nodes_and_followed(
    world: World,
) -> None:
    job = await world.submit()
    await job.until_phase("RUNNING")
    following = await started(world, "logs", job.name, "--follow")
    assert following.stdout is not None
    first = [(await following.stdout.readline()).decode() for _ in range(2)]
    assert {*first} == {f"[rank {rank}] rank {rank} of generation 1 starts\n" for rank in (0, 1)}
    await finish(job)
    async with asyncio.timeout(60):
        rest, _ = await following.communicate()
    assert following.returncode == 0
    assert [line.split(b": ")[0] for line in rest.splitlines()] == [b"relaunch"], rest
    status, text = await starter(world, "logs", job.name, "--rank", "1", "--tail", "1")
    assert (status, text) == (0, "[rank 1] rank 1 of generation 1 starts\n")


@pytest.mark.long
async def test_s2_7_s2_8_a_node_only_the_controller_lost_trains_on(
    lab: World,
) -> None:
    job = await lab.submit(policy=chaos_policy(**UNHASTY))
    ranks = await trained(job)
    began = time.monotonic()
    lab.places.cut("n2", CONTROL)
    await job.until_phase("NODE_LOST")
    step = job.step() or 0
    await eventually(lambda: advanced(job, step + 40), "a node that was lost trains no more")
    assert time.monotonic() - began > LEASE_AND_FENCE, "until then no peer had to vouch for n2"
    assert await job.phase() == ("NODE_LOST", 1)
    lab.places.heal("n2")
    await job.until_phase("RUNNING")
    assert ((await job.phase())[1], sorted(job.rank_pids())) == (1, ranks)
    (incident,) = await job.incidents()
    assert (
        str(incident.cause) == "NODE_LOST"
        and incident.outcome is not None
        and "came back" in incident.outcome
    )
    await finish(job)


@pytest.mark.long
async def test_s2_8_a_node_lost_to_all_is_replaced_once_ranks_are_gone(
    lab: World,
) -> None:
    job = await lab.submit(policy=chaos_policy(**UNHASTY))
    await trained(job)
    (old,) = job.rank_pids("n2")
    died = time_of_death(old)
    lab.places.cut("n2", BOTH, freeze_ranks=True)
    await job.until_phase("RUNNING", generation=2)
    await job.until_steps()
    assert died.done(), "the old rank lives beside the new ones"
    newer = [line for line in job.starts() if line["token"].endswith("/2")]
    assert {line["node"] for line in newer} == {"n1", "n3"}
    assert died.result() < min(line["at"] for line in newer), (
        "ranks of both generations were alive at once"
    )
    lab.places.heal("n2")
    await finish(job, Expected((LOST,)))


def time_of_death(pid: int) -> asyncio.Future[float]:
    """The moment in which a process ends, on the clock that ranks write their starts by."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[float] = loop.create_future()
    handle = os.pidfd_open(pid)

    def ended() -> None:
        found.set_result(time.monotonic())
        loop.remove_reader(handle)
        os.close(handle)

    loop.add_reader(handle, ended)
    return found
