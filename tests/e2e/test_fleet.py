"""A fleet and its jobs for real, by the command line.

Tested is which job waits, what it is given, and what people say about nodes.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from relaunch.cli import fleets, jobs, node_views
from relaunch.pool.tenants import tenants
from tests.chaos.world import FLEET, QUEUE, Job, World, eventually
from tests.e2e.test_nodes import starter

TRAIN = Path(__file__).parents[2] / "examples" / "train_lm.py"

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    # With a GPU, because all jobs share nodes without one.
    async with World(tmp_path_factory.mktemp("e2e") / "world", 118, gpus=1) as made:
        yield made


async def nodes(world: World, *words: str) -> str:
    status, text = await starter(world, "nodes", *words, "--fleet", FLEET)
    assert status == 0, text
    return text


async def rows(world: World) -> dict[str, dict[str, Any]]:
    """As `nodes list --json` prints them; it is a process each time."""
    return {
        one["name"]: one for one in node_views.rows(await fleets.read(world.client, QUEUE, FLEET))
    }


async def until(
    world: World, patience: float = 180.0, **expected: tuple[str, str | None]
) -> dict[str, dict[str, Any]]:
    """Wait until nodes are in these states, with these jobs.

    Ranks that a look at the nodes has seen are shown until the next look, a minute later.
    """

    async def find_rows() -> dict[str, dict[str, Any]] | None:
        found = await rows(world)
        return (
            found
            if all(
                (found[name]["state"], found[name]["job"]) == what
                for name, what in expected.items()
            )
            else None
        )

    return await eventually(find_rows, f"the nodes are not {expected}", patience, pause=0.5)


async def end(world: World, job: Job) -> None:
    """Have a job give back what it has, unlike `tidy`, which terminates it."""
    await jobs.cancel(world.client, job.name, "the test is over")
    await job.until_phase("CANCELLED")
    await until(world, **dict.fromkeys(world.names, ("free", None)))
    await world.tidy(job)


@pytest.mark.long
async def test_a_job_waits_for_a_quarantined_node_until_its_release(
    world: World,
) -> None:
    async def begun() -> bool:
        return (await starter(world, "nodes", "list", "--fleet", FLEET))[0] == 0

    await eventually(
        begun, "the first list of a fleet does not begin it, or its worker does not start"
    )
    assert {one["name"] for one in json.loads(await nodes(world, "list", "--json"))} == set(
        world.names
    )
    told = await nodes(world, "quarantine", "n1", "--reason", "flaky NVLink")
    assert told.startswith("node n1 ") and "flaky NVLink" in told
    job = await world.submit()

    async def waits() -> bool:
        reason = (await job.state()).reason
        return "n1" in reason and "quarantined" in reason

    await eventually(waits, "the job does not say what it waits for")
    status, shown = await starter(world, "show", job.name, "--json")
    assert (
        status,
        "flaky NVLink" in json.loads(shown)["reason"] or "n1" in json.loads(shown)["reason"],
    ) == (0, True)
    listed = await nodes(world, "list")
    assert f"{job.name} waits for" in listed
    assert job.starts() == [] and job.rank_pids() == []
    assert (await rows(world))["n1"].items() >= {
        "state": "quarantined",
        "reason": "flaky NVLink",
        "job": None,
    }.items()
    assert "n1" in await nodes(world, "release", "n1", "--reason", "reseated")
    await job.until_phase("RUNNING", generation=1)
    assert sorted(slot.node for slot in (await job.state()).slots) == ["n1", "n2"], (
        "spares are for jobs that have run"
    )
    await until(world, n1=("busy", job.name), n2=("busy", job.name), n3=("free", None))
    await end(world, job)


@pytest.mark.long
async def test_a_drained_node_is_left_for_a_spare_and_not_granted(world: World) -> None:
    job = await world.submit()
    await job.until_phase("RUNNING", generation=1)
    await job.until_steps()
    told = await nodes(
        world, "quarantine", "n2", "--reason", "new riser", "--drain", "--within", "2s"
    )
    assert told.startswith("node n2 ")  # the job may have left it already
    await job.until_phase("RUNNING", generation=2)
    assert "n2" not in {slot.node for slot in (await job.state()).slots}
    found = await until(world, n1=("busy", job.name), n2=("quarantined", None))
    assert found["n2"]["reason"] == "new riser"
    assert job.rank_pids("n2") == []
    await nodes(world, "release", "n2", "--reason", "it has one")
    await end(world, job)


@pytest.mark.long
async def test_a_job_moves_after_a_checkpoint_and_resumes_from_it(
    world: World,
) -> None:
    every = 40
    flags = ("--steps", "100000", "--step-time", "0.05", "--checkpoint-every", str(every))
    job = await world.submit(
        command=[sys.executable, str(TRAIN), *flags, "--checkpoint", str(world.folder / "moved")]
    )
    await job.until_phase("RUNNING", generation=1)

    async def saves() -> bool:
        watch = (await job.look()).watch
        return watch is not None and watch.checkpoint is not None

    await eventually(saves, "no watch shows people a checkpoint")
    assert ", checkpoint " in (await starter(world, "show", job.name))[1]
    told = await nodes(
        world, "quarantine", "n2", "--reason", "swap its PSU", "--drain", "--within", "2h"
    )
    assert job.name in told
    await job.until_phase("RUNNING", generation=2)
    state = await job.state()
    assert "n2" not in {slot.node for slot in state.slots} and (
        state.restarts_spent,
        state.incidents,
    ) == (0, ())
    saved = next(
        found
        for notice in state.notices
        if (found := re.search(r"swap its PSU; checkpoint of step (\d+) is saved", notice))
    )

    async def goes_on() -> re.Match[str] | None:
        _, text = await starter(world, "logs", job.name, "--generation", "2", "--rank", "0")
        return re.search(r"going on after step (\d+)", text)

    step = int((await eventually(goes_on, "the second generation says nothing"))[1])
    assert step % every == 0 and 0 <= step - int(saved[1]) <= every, (
        "from that one, or from the next"
    )
    status, text = await starter(
        world, "answer", job.name, "deny", "--node", "n2", "--reason", "too late"
    )
    assert (status, f"n2 of {job.name}" in text) == (2, True), text
    await nodes(world, "release", "n2", "--reason", "it has one")
    await end(world, job)


@pytest.mark.long
async def test_a_terminated_fleet_asks_jobs_what_they_hold_first(
    world: World,
) -> None:
    job = await world.submit()
    await job.until_phase("RUNNING", generation=1)
    await world.client.get_workflow_handle(f"fleet/{FLEET}").terminate("by mistake")
    second = await world.submit()

    async def knows() -> bool:
        here = tenants(await fleets.read(world.client, QUEUE, FLEET)).get("n1", ())
        return [(one.job, one.place is not None) for one in here] == [(job.name, True)]

    await eventually(knows, "the job has not said what it holds", pause=0.5)
    assert json.loads(await nodes(world, "show", "n1", "--json"))["tenants"][0]["claimed"]
    await job.until_steps()
    assert (await job.phase())[1] == 1
    assert second.starts() == []
    await jobs.cancel(world.client, job.name, "the test is over")
    await second.until_phase("RUNNING", generation=1)
    await end(world, second)
    await world.tidy(job)


@pytest.mark.long
async def test_a_pause_is_shown_until_it_ends_and_grants_go_on(
    world: World,
) -> None:
    assert "maintenance" in await nodes(world, "pause", "--reason", "maintenance")
    fleet = json.loads(await nodes(world, "show", "--json"))
    assert fleet["breaker"]["paused"].endswith("maintenance")
    job = await world.submit()
    await job.until_phase("RUNNING", generation=1)
    assert "paused" in await nodes(world, "list")
    assert "chaos" in await nodes(world, "resume", "--reason", "done")
    assert "paused" not in await nodes(world, "list")
    await end(world, job)


@pytest.mark.long
async def test_a_new_node_of_the_file_is_there_once_it_was_applied(world: World) -> None:
    file = world.folder / "chaos.yaml"
    before = file.read_text()
    world.node("n5").mkdir(parents=True, mode=0o700)
    file.write_text(f"{before}  - {{name: n5, address: {world.address('n5')}, gpus: 1}}\n")
    assert await nodes(world, "apply", "--reason", "a new machine") == "new: n5\n"
    await until(world, n5=("free", None))
    assert "5 nodes" in await nodes(world, "apply")
    file.write_text(before)
    assert await nodes(world, "apply") == "gone: n5\n"
    assert set(await rows(world)) == set(world.names)


@pytest.mark.long  # tests/console/test_fleets.py has the same sentences
async def test_what_is_unknown_changes_nothing(world: World) -> None:
    status, text = await starter(
        world, "nodes", "quarantine", "n9", "--reason", "x", "--fleet", FLEET
    )
    assert (status, "'n9'" in text and "fleet chaos" in text) == (2, True), text
    status, text = await starter(world, "nodes", "list", "--fleet", "chaso")
    assert (status, "'chaso'" in text and "serves chaos" in text) == (
        2,
        True,
    ), text


@pytest.mark.long  # see test_orphaned_ranks_… in tests/workflows
async def test_what_a_terminated_job_leaves_is_stopped_and_given_back(world: World) -> None:
    job = await world.submit()
    await job.until_phase("RUNNING", generation=1)
    await until(world, n1=("busy", job.name), n2=("busy", job.name))
    await jobs.handle_of(world.client, job.name).terminate("by mistake")
    await nodes(world, "apply")  # it looks then, and not only once a minute
    await until(world, n1=("free", None), n2=("free", None))
    assert job.rank_pids() == []
    status, text = await starter(world, "show", job.name)
    assert (status, "phase       TERMINATED" in text) == (0, True), text
    await world.tidy(job)
