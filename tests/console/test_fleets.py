"""`relaunch nodes …` as people type it: real processes, a real server, and a fleet workflow.

The workflow only remembers what it was sent.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion
from temporalio import activity
from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError
from temporalio.worker import Worker

from relaunch.cli import answers, fleets
from relaunch.cli.jobs import load_job
from relaunch.cli.submit import retry, submit
from relaunch.config import ConfigError
from relaunch.messages.fleets import FleetInput
from relaunch.messages.ids import TASK_QUEUE
from relaunch.pool.state import FleetState, NodeProbe
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import preset
from relaunch.temporal import ensure_namespace
from tests.console.commands import STARTER, Done, Place, bare_environment, one_sentence
from tests.console.fake_fleet import DEAF, FakeFleet, FakeRepair, read_fleet
from tests.console.fake_job import FakeTrainingJob
from tests.pages import sections

pytestmark = pytest.mark.timeout(
    600
)  # ten command lines side by side are a minute on two busy cores


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


@pytest.mark.long
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
    assert "gpu-01" in answer and "flaky NVLink" in answer
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
    assert "llama" in drained
    assert repr(("within", "30m")) in (await notices(place))[-1]
    assert (
        read_output(await place.starter("nodes", "list")).splitlines()[2].split()[1] == "draining"
    )
    assert "gpu-01" in read_output(
        await place.starter("nodes", "release", "gpu-01", "--reason", "reseated")
    )
    in_service = json.loads(read_output(await place.starter("nodes", "show", "gpu-01", "--json")))
    assert in_service["status"] == "in service"
    shown = read_output(await place.starter("nodes", "show", "gpu-02")).splitlines()
    assert shown[1].split()[:3] == ["state", "draining", "by"]


@pytest.mark.long
async def test_repairs_are_paused_and_resumed_and_the_file_is_applied(
    place: Place, page: SnapshotAssertion
) -> None:
    paused = read_output(await place.starter("nodes", "pause", "--reason", "maintenance"))
    (by,) = re.findall(r"by (\S+@\S+): maintenance$", paused)
    shown = await place.starter("nodes", "show")
    assert f"by {by}: maintenance" in read_output(shown)
    breaker = json.loads(read_output(await place.starter("nodes", "show", "--json")))["breaker"]
    assert breaker["paused"] == f"{by}: maintenance"
    resumed = read_output(await place.starter("nodes", "resume", "--reason", "done"))
    breaker = json.loads(read_output(await place.starter("nodes", "show", "--json")))["breaker"]
    assert breaker["paused"] is None
    pages = {
        "pause": paused.replace(by, "grace@ops"),
        "resume": resumed,
        "apply": read_output(await place.starter("nodes", "apply")),
        "apply again": read_output(await place.starter("nodes", "apply")),
    }
    assert sections(pages) == page


@pytest.mark.long
async def test_a_repair_without_a_job_is_answered_by_its_nodes_name(
    place: Place,
) -> None:
    repair = await place.client.start_workflow(
        "NodeRepair", id="repair/default/gpu-01", task_queue=TASK_QUEUE, result_type=str
    )
    one_sentence(
        await place.starter("nodes", "answer", "gpu-01", "approve", "--reboot", "--reason", DEAF),
        "repair/default/gpu-01",
        "nothing is asked",
    )
    one_sentence(
        await place.starter("nodes", "answer", "gpu-01", "maybe", "--reason", "x"),
        "'maybe'",
        "approve or deny",
    )
    for decision, options, *expected in (
        ("approve", (), "--reset-gpus, --reboot, --power-cycle"),
        ("approve", ("--reboot", "--reset-gpus"), "one of them"),
        ("deny", ("--reboot",), "none"),
    ):
        words = ("nodes", "answer", "gpu-01", decision, *options, "--reason", "x")
        one_sentence(await place.starter(*words), decision, *options, *expected)
    assert "gpu-01" in read_output(
        await place.starter("nodes", "answer", "gpu-01", "deny", "--reason", "mine")
    )
    assert await repair.result() == "deny: mine"
    for node in ("gpu-01", "gpu-02"):
        one_sentence(
            await place.starter("nodes", "answer", node, "deny", "--reason", "x"),
            f"repair/default/{node}",
        )


REBOOT = ("nodes", "repair", "--reboot", "--reason", "Xid 79")


async def test_a_repair_without_a_worker_is_not_ordered(bare: Place) -> None:
    done = await bare.starter(*REBOOT, "gpu-09", RELAUNCH_TASK_QUEUE="unserved")
    _, refusal = done.err.splitlines()
    assert (done.code, done.out) == (2, ""), done
    assert "no worker answers for fleet default, and nothing was ordered" in refusal
    with pytest.raises(RPCError):
        await bare.client.get_workflow_handle("repair/default/gpu-09").describe()


async def test_a_repair_says_how_it_ended_and_that_it_goes_on(place: Place) -> None:
    repair = place.client.get_workflow_handle("repair/default/gpu-01")

    async def order() -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, STARTER, *REBOOT, "gpu-01"),
            env=bare_environment({"TEMPORAL_ADDRESS": place.address}),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        while True:
            assert process.returncode is None
            try:
                described = await repair.describe()
            except RPCError:
                continue
            if described.status is WorkflowExecutionStatus.RUNNING:
                return process

    waiting = await order()
    waiting.send_signal(signal.SIGINT)
    out, err = await waiting.communicate()
    assert (waiting.returncode, out) == (130, b"")
    assert "if it was ordered, it goes on: to cancel it, see repair/default/gpu-01" in err.decode()
    assert (await repair.describe()).status is WorkflowExecutionStatus.RUNNING
    await repair.terminate(reason="by mistake")
    waiting = await order()
    await repair.terminate(reason="by mistake")
    out, err = await waiting.communicate()
    _, refusal = err.decode().splitlines()
    assert (waiting.returncode, out) == (2, b"")
    assert "its repair was terminated (by mistake)" in refusal


UNUSABLE: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("quarantine", "gpu-1", "--reason", "x"), ("'gpu-1'", "default", "gpu-01, gpu-0")),
    (("release", "gpu-99", "--reason", "x"), ("'gpu-99'", "default", "gpu-0")),
    (("show", "web"), ("'web'", "default", "gpu-01, gpu-02, gpu-03")),
    (("show", "a/b"), ("'a/b'",)),
    (("list", "--fleet", "defualt"), ("'defualt'", "expected default")),
    (("pause", "--fleet", "defualt", "--reason", "x"), ("'defualt'",)),
    (("apply", "--fleet", "a/b"), ("'a/b'",)),
    (("quarantine", "gpu-01", "--reason", "x", "--within", "5m"), ("--within 5m", "--drain")),
    (
        ("quarantine", "gpu-01", "--reason", "x", "--drain", "--within", "5"),
        ("--within", "'5'", "30s"),
    ),
    (("quarantine", "gpu-01", "--reason", "x", "--drain", "--within", "0s"), ("--within", "'0s'")),
)


async def test_what_is_unknown_is_one_sentence_and_nothing_is_sent(
    place: Place, page: SnapshotAssertion
) -> None:
    answers = {}
    for done, (words, expected) in zip(
        await asyncio.gather(*(place.starter("nodes", *words) for words, _ in UNUSABLE)),
        UNUSABLE,
        strict=True,
    ):
        one_sentence(done, *expected)
        answers[f"relaunch nodes {' '.join(words)}"] = done.err
    assert sections(answers) == page
    assert not await begun(place, "defualt")
    assert await notices(place) == []


async def test_jobs_on_fleets_and_nodes_that_are_unknown_are_refused(
    place: Place, page: SnapshotAssertion
) -> None:
    await ensure_namespace(place.client)
    said = {}

    def spec(fleet: str) -> JobSpec:
        return JobSpec(name="llama", command=("wait",), nodes=2, fleet=fleet)

    with pytest.raises(ConfigError) as caught:
        await submit(place.client, TASK_QUEUE, spec("defualt"), preset("default"))
    said["submit --fleet defualt"] = str(caught.value)
    async with Worker(place.client, task_queue="jobs", workflows=[FakeTrainingJob]):
        # As soon as a worker serves it, it is known; one that runs is not asked for.
        await submit(place.client, TASK_QUEUE, spec("default"), preset("default"))
        await place.client.get_workflow_handle("job/llama").terminate()
        await fleets.read(place.client, TASK_QUEUE, "default")
        await submit(place.client, "jobs", spec("default"), preset("default"))
        with pytest.raises(ConfigError) as caught:
            await retry(place.client, "jobs", "llama", "slow", ("gpu-1",), False)
        said["retry --avoid gpu-1"] = str(caught.value)
        now = await load_job(place.client, "llama")
        assert now.state is not None and now.state.generation == 1
        await retry(place.client, "jobs", "llama", "slow", ("gpu-01",), False)
        await place.client.get_workflow_handle("job/llama").terminate()
    assert sections(said) == page


async def test_a_node_is_declared_dead_in_the_named_fleet_only(bare: Place) -> None:
    """Two fleets have a node of that name, and it is off in one of them."""
    await ensure_namespace(bare.client)

    @activity.defn
    async def probe_nodes(input: dict[str, Any]) -> tuple[NodeProbe, ...]:
        silent = "no route to host" if input["fleet"] == "default" else ""
        return tuple(NodeProbe(node, silent) for node in input["nodes"])

    async def read_notices(job: str) -> tuple[str, ...]:
        state = (await load_job(bare.client, job)).state
        assert state is not None
        return state.notices

    async def declare(fleet: str) -> tuple[str, ...]:
        return await fleets.declare_dead(bare.client, TASK_QUEUE, fleet, "local-1", "burnt", False)

    # What no worker works for is in the way of that fleet only.
    idle = FleetInput("idle")
    await bare.client.start_workflow("Fleet", idle, id="fleet/idle", task_queue="idle")
    async with Worker(
        bare.client, task_queue=TASK_QUEUE, workflows=[FakeTrainingJob], activities=[probe_nodes]
    ):
        for job, fleet in (("here", "default"), ("there", "lab")):
            spec = JobSpec(name=job, command=("wait",), nodes=2, fleet=fleet)
            await submit(bare.client, TASK_QUEUE, spec, preset("default"), has_fleet=True)
        assert await declare("default") == ("here",)
        assert (await read_notices("here"), await read_notices("there")) == (
            ("local-1 dead: burnt",),
            (),
        )
        with pytest.raises(ConfigError, match="node local-1 of fleet lab answered just now"):
            await declare("lab")
        words = ("nodes", "declare-dead", "local-1", "--reason", "burnt", "--force", "--fleet")
        one_sentence(await bare.starter(*words, "third"), "local-1", "third", ": default, lab")
        output = read_output(await bare.starter(*words, "lab"))
        assert output == "node local-1 of fleet lab declared dead: reported to there"
        assert len(await read_notices("here")) == len(await read_notices("there")) == 1
        await bare.client.start_workflow(
            "TrainingJob", id="job/idle", task_queue="idle", memo={"fleet": "idle"}
        )
        assert await declare("default") == ("here",)


async def test_what_the_fleet_does_not_take_is_said_with_what_it_noted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "EFFECT_TIMEOUT", 0.5)
    answer = await fleets.quarantine(
        place.client, TASK_QUEUE, "default", "gpu-01", DEAF, drain=False, within=None
    )
    assert (answer.shown, len(answer.news), DEAF in answer.news[0]) == (False, 1, True)


async def test_a_worker_that_is_busy_is_waited_for(
    bare: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that asked for work a moment ago, and does not answer in time."""

    def work() -> Worker:
        return Worker(
            bare.client, task_queue=TASK_QUEUE, workflows=[FakeFleet], activities=[read_fleet]
        )

    async with work():
        await fleets.read(bare.client, TASK_QUEUE, "default")
    check, is_late = fleets._check_worker, asyncio.Event()

    async def check_worker(*arguments: Any) -> None:
        await check(*arguments)
        is_late.set()

    monkeypatch.setattr(fleets, "_check_worker", check_worker)
    monkeypatch.setattr(fleets, "QUERY_TIMEOUT", timedelta(seconds=0.5))
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(fleets.read(bare.client, TASK_QUEUE, "default"))
        await is_late.wait()
        monkeypatch.setattr(fleets, "QUERY_TIMEOUT", timedelta(seconds=60))
        async with work():
            assert (await reading).nodes


@pytest.mark.long
async def test_where_no_worker_answers_that_is_said_in_one_sentence(
    bare: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_sentence(await bare.starter("nodes", "list"), "no worker answers", "default", "relaunch up")
    assert not await begun(bare, "default")
    async with Worker(
        bare.client, task_queue=TASK_QUEUE, workflows=[FakeFleet], activities=[read_fleet]
    ):
        await fleets.read(bare.client, TASK_QUEUE, "default")
    await bare.client.start_workflow(
        "NodeRepair", id="repair/default/gpu-01", task_queue=TASK_QUEUE
    )
    with pytest.raises(ConfigError, match="repair/default/gpu-01: no worker answers"):
        await answers.for_node(bare.client, "default", "gpu-01", "deny", "x")
    monkeypatch.setattr(fleets, "BUSY_TIMEOUT_S", 0.0)
    with pytest.raises(ConfigError, match="no worker answers for fleet default: one asked for"):
        await fleets.quarantine(
            bare.client, TASK_QUEUE, "default", "gpu-01", "x", drain=False, within=None
        )
