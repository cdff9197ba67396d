"""`relaunch nodes …` as people type it: real processes, a real server, and a fleet workflow.

The workflow only remembers what it was sent.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from relaunch.cli import answers, fleets
from relaunch.cli.service import find_server
from relaunch.config import ConfigError
from relaunch.messages.ids import TASK_QUEUE
from relaunch.pool.state import FleetState
from relaunch.temporal import data_converter
from tests.console.fake_fleet import DEAF, FakeFleet, FakeRepair, read_fleet
from tests.console.test_command_line import Done, Place, one_sentence

pytestmark = pytest.mark.timeout(
    600
)  # ten command lines side by side are a minute on two busy cores


@pytest.fixture
async def bare(tmp_path: Path) -> AsyncIterator[Place]:
    environment = await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(find_server()),
        dev_server_log_level="error",
        data_converter=data_converter(),
    )
    async with environment:
        yield Place(
            environment.client, environment.client.service_client.config.target_host, tmp_path
        )


@pytest.fixture
async def place(bare: Place) -> AsyncIterator[Place]:
    async with Worker(
        bare.client,
        task_queue=TASK_QUEUE,
        workflows=[FakeFleet, FakeRepair],
        activities=[read_fleet],
    ):
        yield bare


def read_output(done: Done) -> str:
    assert (done.code, done.err) == (0, ""), done
    return done.out.strip()


async def notices(place: Place) -> list[str]:
    state = await place.client.get_workflow_handle("fleet/default").query(
        "state", result_type=FleetState
    )
    return list(state.notices)


async def begun(place: Place, fleet: str) -> bool:
    try:
        described = await place.client.get_workflow_handle(f"fleet/{fleet}").describe()
    except RPCError:
        return False
    return described.status is WorkflowExecutionStatus.RUNNING


async def test_listing_begins_a_fleet_that_is_new_or_was_terminated(
    place: Place,
) -> None:
    listed = json.loads(read_output(await place.starter("nodes", "list", "--json")))
    assert [(one["name"], one["state"], one["job"]) for one in listed] == [
        ("gpu-01", "free", None),
        ("gpu-02", "busy", "llama"),
        ("gpu-03", "free", None),
    ]
    assert [
        line.split()[:2] for line in read_output(await place.starter("nodes", "list")).splitlines()
    ] == [
        ["NODE", "STATE"],
        ["gpu-01", "free"],
        ["gpu-02", "busy"],
        ["gpu-03", "free"],
    ]
    await place.client.get_workflow_handle("fleet/default").terminate("by mistake")
    assert (await fleets.read(place.client, TASK_QUEUE, "default")).name == "default"
    assert await begun(place, "default")


async def test_quarantine_and_release_each_say_the_new_state(place: Place) -> None:
    answer = read_output(
        await place.starter("nodes", "quarantine", "gpu-01", "--reason", "flaky NVLink")
    )
    assert answer.startswith("node gpu-01 is quarantined: flaky NVLink; no job has it")
    shown = json.loads(read_output(await place.starter("nodes", "show", "gpu-01", "--json")))
    assert (shown["state"], shown["reason"], "@" in shown["by"]) == (
        "quarantined",
        "flaky NVLink",
        True,
    )
    drained = read_output(
        await place.starter(
            "nodes", "quarantine", "gpu-02", "--reason", "new riser", "--drain", "--within", "30m"
        )
    )
    assert "llama has to leave it by" in drained
    assert "('within', '30m')" in (await notices(place))[-1]
    assert (
        read_output(await place.starter("nodes", "list")).splitlines()[2].split()[1] == "draining"
    )
    assert "gpu-01 is in service" in read_output(
        await place.starter("nodes", "release", "gpu-01", "--reason", "reseated")
    )
    assert "state       draining by " in read_output(await place.starter("nodes", "show", "gpu-02"))


@pytest.mark.long
async def test_repairs_are_paused_and_resumed_and_the_file_is_applied(place: Place) -> None:
    paused = read_output(await place.starter("nodes", "pause", "--reason", "maintenance"))
    assert paused.startswith("repairs of fleet default are paused by ") and paused.endswith(
        ": maintenance"
    )
    assert "note        repairs are paused since " in read_output(
        await place.starter("nodes", "show")
    )
    assert json.loads(read_output(await place.starter("nodes", "show", "--json")))["breaker"][
        "paused"
    ].endswith("maintenance")
    assert (
        read_output(await place.starter("nodes", "resume", "--reason", "done"))
        == "fleet default gives nodes to jobs and repairs them again"
    )
    applied = read_output(await place.starter("nodes", "apply"))
    assert applied.splitlines() == [
        "new: gpu-04",
        "gone: gpu-03",
        "changed: limits: repairs_at_once 2, now 3",
    ]
    assert (
        read_output(await place.starter("nodes", "apply"))
        == "fleet default has the 3 nodes of its file already"
    )


@pytest.mark.long
async def test_a_repair_without_a_job_is_answered_by_its_nodes_name(
    place: Place,
) -> None:
    repair = await place.client.start_workflow(
        "NodeRepair", id="repair/default/gpu-01", task_queue=TASK_QUEUE, result_type=str
    )
    one_sentence(
        await place.starter("nodes", "answer", "gpu-01", "approve", "--reason", DEAF),
        "node gpu-01: repair/default/gpu-01: nothing is asked: the node is looked at",
    )
    one_sentence(
        await place.starter("nodes", "answer", "gpu-01", "maybe", "--reason", "x"),
        "unknown answer 'maybe': expected approve or deny",
    )
    assert (
        read_output(
            await place.starter("nodes", "answer", "gpu-01", "deny", "--reason", "it is mine")
        )
        == "deny: sent to the repair of gpu-01"
    )
    assert await repair.result() == "deny: it is mine"
    for node in ("gpu-01", "gpu-02"):
        one_sentence(
            await place.starter("nodes", "answer", node, "deny", "--reason", "x"),
            f"node {node}: no repair repair/default/{node} is running",
        )


UNUSABLE = (
    (
        ("quarantine", "gpu-1", "--reason", "x"),
        "node 'gpu-1' is not in fleet default: expected one of gpu-01, gpu-0",
    ),
    (
        ("release", "gpu-99", "--reason", "x"),
        "node 'gpu-99' is not in fleet default: expected one of gpu-0",
    ),
    (("show", "web"), "node 'web' is not in fleet default: expected one of gpu-01, gpu-02, gpu-03"),
    (("show", "a/b"), "'a/b' is not a name"),
    (
        ("list", "--fleet", "defualt"),
        "fleet 'defualt' is not served by this worker: expected default",
    ),
    (("pause", "--fleet", "defualt", "--reason", "x"), "fleet 'defualt' is not served"),
    (("apply", "--fleet", "a/b"), "'a/b' is not a name"),
    (
        ("quarantine", "gpu-01", "--reason", "x", "--within", "5m"),
        "--within 5m limits how long a drain takes: use it together with --drain",
    ),
    (
        ("quarantine", "gpu-01", "--reason", "x", "--drain", "--within", "5"),
        "--within: '5' is not a duration: write it like 30s",
    ),
    (
        ("quarantine", "gpu-01", "--reason", "x", "--drain", "--within", "0s"),
        "--within: '0s' is not a duration",
    ),
)


async def test_what_is_unknown_is_one_sentence_and_nothing_is_sent(place: Place) -> None:
    for done, (_, expected) in zip(
        await asyncio.gather(*(place.starter("nodes", *words) for words, _ in UNUSABLE)),
        UNUSABLE,
        strict=True,
    ):
        one_sentence(done, expected)
    assert not await begun(place, "defualt")
    assert await notices(place) == []


async def test_what_the_fleet_does_not_take_is_said_with_what_it_noted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "SHOWN_WITHIN", 0.5)
    answer = await fleets.quarantine(
        place.client, TASK_QUEUE, "default", "gpu-01", DEAF, drain=False, within=None
    )
    assert (answer.shown, len(answer.news), DEAF in answer.news[0]) == (False, 1, True)


@pytest.mark.long
async def test_where_no_worker_answers_that_is_said_in_one_sentence(
    bare: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_sentence(
        await bare.starter("nodes", "list"), "no worker answers for fleet default: start one"
    )
    assert not await begun(bare, "default"), "no worker could say whether there is such a fleet"
    async with Worker(
        bare.client, task_queue=TASK_QUEUE, workflows=[FakeFleet], activities=[read_fleet]
    ):
        await fleets.read(bare.client, TASK_QUEUE, "default")
    await bare.client.start_workflow(
        "NodeRepair", id="repair/default/gpu-01", task_queue=TASK_QUEUE
    )
    with pytest.raises(ConfigError, match="node gpu-01: repair/default/gpu-01: no worker answers"):
        await answers.for_node(bare.client, "default", "gpu-01", "deny", "x")
    with pytest.raises(ConfigError, match="no worker answers for fleet default"):
        await fleets.quarantine(
            bare.client, TASK_QUEUE, "default", "gpu-01", "x", drain=False, within=None
        )
