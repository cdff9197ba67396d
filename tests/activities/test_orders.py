"""Launching, stopping, finding nodes, archiving and reading logs.

Each is said once, repeated without harm, and honest about silence.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio.api.common.v1 import Payload
from temporalio.exceptions import ApplicationError

import relaunch.job.fencing
from relaunch.activities.launch import (
    LAUNCH_ATTEMPTS,
    LaunchRanksOutput,
    PreparedNode,
    find_last_step,
    make_gang,
)
from relaunch.activities.logs import LogActivities
from relaunch.activities.records import (
    ArchiveIncidentsInput,
    RecordActivities,
    archive_file,
    read_archive,
)
from relaunch.activities.stop import StopRanksInput, StopRanksOutput
from relaunch.backends.base import Preparation, PrepareOrder, Refusal, StartOrder
from relaunch.evidence.causes import Cause
from relaunch.job.state import Incident
from relaunch.messages.logs import ReadLogsInput
from relaunch.temporal import data_converter
from tests.activities.harness import PATIENCE, TOKEN, Stand, ago, environment, stand
from tests.fakes.nodes import Fault, Lingers, Prints, Refuse, Script


async def stop(fleet: Stand, **changes: object) -> StopRanksOutput:
    given = StopRanksInput(TOKEN, "default", ("n1", "n2"), fleet.timeouts, 2)
    stopping = environment().run(fleet.jobs.stop_ranks, replace(given, **changes))  # type: ignore[arg-type]
    return await asyncio.wait_for(stopping, PATIENCE)


async def test_a_launch_that_lost_an_answer_starts_nothing_twice() -> None:
    fleet = stand(Script(faults=(Fault(kind="lose_answer", command="start", node="n2"),)))
    with pytest.raises(ApplicationError) as first:
        await fleet.launch(attempt=1)
    assert (first.value.type, first.value.non_retryable) == ("NodesUnreachable", False)
    answer = await fleet.launch(attempt=2)
    assert isinstance(answer, LaunchRanksOutput)
    assert answer.started_at is not None
    assert len([life for life in fleet.backend.lives if life.kind == "started"]) == 4


@pytest.mark.parametrize(
    ("known", "last"),
    [
        ([(12, 4), (11, 4), (None, None)], (11, 4)),
        ([(900, 7), (100, 3), (901, 7)], (900, 7)),  # a node that was away since generation 3
        ([(None, None)], (None, None)),
    ],
)
def test_the_last_step_is_of_the_newest_known_generation(
    known: list[tuple[int | None, int | None]], last: tuple[int | None, int | None]
) -> None:
    nodes = [
        PreparedNode("n", "", 1, 1, 0.0, "", step=step, step_generation=generation)
        for step, generation in known
    ]
    outputs = [
        LaunchRanksOutput(step=one.step, step_generation=one.step_generation) for one in nodes
    ]
    assert find_last_step(nodes) == find_last_step(outputs) == last


async def test_a_launch_answers_with_the_last_step_that_its_nodes_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = stand(Script(()))
    prepare, steps = fleet.backend.prepare, {"n1": (100, 1), "n2": (900, 3)}

    async def prepare_after(node: str, order: PrepareOrder) -> Preparation | Refusal:
        answer = await prepare(node, order)
        step, generation = steps[node]
        assert isinstance(answer, Preparation)
        return replace(answer, step=step, step_generation=generation)

    monkeypatch.setattr(fleet.backend, "prepare", prepare_after)
    answer = await fleet.launch()
    assert (answer.step, answer.step_generation) == (900, 3)


@pytest.mark.parametrize(("command", "sent"), [("prepare", False), ("start", True)])
async def test_the_last_attempt_names_silent_nodes_and_possible_ranks(
    command: str, sent: bool
) -> None:
    fleet = stand(Script(faults=(Fault(kind="lose_order", command=command, node="n2", nth=None),)))  # type: ignore[arg-type]
    answer = await fleet.launch(attempt=LAUNCH_ATTEMPTS)
    assert (answer.unreachable, answer.start_sent) == (("n2",), sent)
    assert "n2" in answer.reason


async def test_a_launch_failing_at_prepare_admits_ranks_started_before() -> None:
    lost = Fault(kind="lose_order", command="prepare", node="n2", nth=None)
    fleet = stand(Script(faults=(lost,)))
    stamps = {"n1": 1.0, "n2": 2.0}
    answer = await environment(attempt=LAUNCH_ATTEMPTS, details=(stamps,)).run(
        fleet.jobs.launch_ranks, fleet.launch_input()
    )
    assert (answer.unreachable, answer.start_sent) == (("n2",), True)


@pytest.mark.parametrize(("command", "sent"), [("prepare", False), ("start", True)])
async def test_a_refusal_says_whether_ranks_of_others_may_run(command: str, sent: bool) -> None:
    fleet = stand(
        Script((Refuse(command=command, node="n1", why="held", reason="it is examined"),))
    )  # type: ignore[arg-type]
    answer = await fleet.launch()
    assert ([refusal.node for refusal in answer.refusals], answer.start_sent) == (["n1"], sent)


async def test_a_refusal_is_reported_at_once_and_nothing_is_started() -> None:
    fleet = stand(
        Script((Refuse(command="prepare", node="n1", why="stuck", reason="rank 0 is in D state"),))
    )
    answer = await fleet.launch()
    assert [(r.node, r.why, r.reason) for r in answer.refusals] == [
        ("n1", "stuck", "rank 0 is in D state")
    ]
    assert fleet.backend.lives == []


async def test_a_launcher_that_is_not_the_current_one_starts_nothing() -> None:
    fleet = stand()
    fleet.server.fails = RuntimeError("another attempt is the current one")
    with pytest.raises(RuntimeError):
        await fleet.launch()
    assert fleet.backend.lives == []


async def test_a_stop_ends_with_the_last_rank_and_may_be_repeated() -> None:
    fleet = stand(Script((Lingers(rank=3, seconds=60),)))
    await fleet.launch()
    for _ in range(2):
        answer = await stop(fleet)
        assert (sorted(answer.nodes), answer.fenced) == (["n1", "n2"], ())
    assert len([life for life in fleet.backend.lives if life.kind == "ended"]) == 4


async def test_a_silent_node_is_fenced_only_after_another_proven_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relaunch.job.fencing, "FENCE_MARGIN", timedelta(milliseconds=100))
    short = {"lease": "900ms", "heartbeat": "100ms", "fence_after": "300ms", "stop_grace": "100ms"}
    fleet = stand(timeouts=short)
    await fleet.launch()
    fleet.backend.cut("n2")
    answer = await stop(fleet, unheard_for=(("n2", timedelta(seconds=0.2)),))
    assert answer.fenced == ("n2",)
    assert not [
        life
        for life in fleet.backend.lives
        if life.kind == "ended" and life.at > answer.at.timestamp()
    ]
    assert len([life for life in fleet.backend.lives if life.kind == "ended"]) == 4, (
        "it is true of the node"
    )


async def test_without_a_witness_no_silence_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaunch.job.fencing, "FENCE_MARGIN", timedelta(0))
    fleet = stand(
        timeouts={
            "lease": "600ms",
            "heartbeat": "100ms",
            "fence_after": "100ms",
            "stop_grace": "100ms",
        }
    )
    fleet.backend.cut("n1")
    fleet.backend.cut("n2")
    long_ago = (("n1", timedelta(days=1)), ("n2", timedelta(days=1)))
    given = StopRanksInput(TOKEN, "default", ("n1", "n2"), fleet.timeouts, 2, unheard_for=long_ago)
    stopping = asyncio.create_task(environment().run(fleet.jobs.stop_ranks, given))
    done, _ = await asyncio.wait([stopping], timeout=3)
    assert not done
    fleet.backend.heal("n1")
    fleet.backend.heal("n2")
    assert (await asyncio.wait_for(stopping, PATIENCE)).fenced == ()


@pytest.mark.parametrize("command", ["stop", "prepare"])
async def test_s4_10_ranks_are_stopped_on_all_nodes_at_once(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """By an order, or by the preparation of the next generation: no node waits for another."""
    nodes = tuple(f"n{number}" for number in range(1, 7))
    fleet = stand(nodes=len(nodes))
    await fleet.launch()
    all_have_the_order, carry_out = asyncio.Barrier(len(nodes)), getattr(fleet.backend, command)

    async def wait_for_others(node: str, order: Any) -> Any:
        await asyncio.wait_for(all_have_the_order.wait(), PATIENCE / 8)
        return await carry_out(node, order)

    monkeypatch.setattr(fleet.backend, command, wait_for_others)
    if command == "stop":
        assert {*(await stop(fleet, nodes=nodes, gang_size=len(nodes))).nodes} == {*nodes}
    else:
        launching = fleet.launch(token=replace(TOKEN, generation=2))
        assert (await asyncio.wait_for(launching, PATIENCE)).started_at is not None
    assert {life.node for life in fleet.backend.lives if life.kind == "ended"} == {*nodes}


async def test_stopping_once_leaves_a_silent_node_alone() -> None:
    fleet = stand()
    fleet.backend.cut("n2")
    assert (await stop(fleet, once=True)).nodes == ("n1",)


def incident(number: int) -> Incident:
    return Incident(ago(0), number, Cause.APPLICATION, f"number {number}\nand more")


async def test_archiving_twice_adds_nothing_and_mends_a_torn_last_line(
    tmp_path: Path,
) -> None:
    records = RecordActivities(tmp_path)
    first, second, third = (incident(number) for number in (1, 2, 3))
    for _ in range(2):
        assert (
            await environment().run(
                records.archive_incidents,
                ArchiveIncidentsInput("default", "llama", (first, second)),
            )
            == 2
        )
    path = archive_file(tmp_path, "default", "llama")
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert read_archive(tmp_path, "default", "llama") == [first]
    assert (
        await environment().run(
            records.archive_incidents,
            ArchiveIncidentsInput("default", "llama", (first, second, third)),
        )
        == 3
    )
    assert read_archive(tmp_path, "default", "llama") == [first, second, third]
    assert read_archive(tmp_path, "default", "other") == []


async def test_logs_are_read_on_from_their_place_and_name_silent_nodes(
    tmp_path: Path,
) -> None:
    fleet = stand(Script((Prints(rank=0, text="one\ntwo\n"), Prints(rank=2, text="three\n"))))
    await fleet.launch()
    logs = LogActivities(fleet.fleets, tmp_path)
    order = ReadLogsInput(
        "default", ("n1", "n2"), TOKEN.namespace, TOKEN.job, TOKEN.submission, TOKEN.generation
    )
    answer = await environment().run(logs.read_logs, order)
    assert sorted((piece.rank, piece.data) for piece in answer.chunks) == [
        (0, "one\ntwo\n"),
        (2, "three\n"),
    ]
    assert (answer.ended, answer.unreachable) == (False, ())
    tail = await environment().run(logs.read_logs, replace(order, tail=1))
    assert sorted((piece.rank, piece.data) for piece in tail.chunks) == [
        (0, "two\n"),
        (2, "three\n"),
    ]
    fleet.backend.cut("n2")
    answer = await environment().run(logs.read_logs, order)
    assert [piece.rank for piece in answer.chunks] == [0]
    assert [text.partition(":")[0] for text in answer.unreachable] == ["n2"]


# --- a gang of several shards


async def test_a_gang_of_several_shards_has_one_secret_not_in_history() -> None:
    fleet = stand(nodes=4)
    orders, outputs = await prepared_in_shards(fleet)
    for order in orders:
        output = await fleet.launch(**order)
        assert output.started_at is not None
    starts = [call.order for call in fleet.backend.calls if call.command == "start"]
    secrets = {order.secret for order in starts if isinstance(order, StartOrder)}
    assert len(starts) == 4 and len(secrets) == 1 and secrets != {""}
    nonces = {answer.nonce for answer in answers(fleet)}
    values = [*outputs, *(fleet.launch_input(**order) for order in orders)]
    history = b"".join(payload.data for value in values for payload in written(value))
    assert len(nonces) == 4 and not [one for one in (*nonces, *secrets) if one.encode() in history]


async def test_a_shard_does_not_start_after_a_new_prepare_of_node_one() -> None:
    fleet = stand(nodes=4)
    orders, _ = await prepared_in_shards(fleet)
    gang = orders[1]["gang"]
    output = await fleet.launch(**{**orders[1], "gang": replace(gang, stamp=gang.stamp + 1)})
    assert [(one.node, one.why) for one in output.refusals] == [("n1", "prepared_again")]
    assert [call for call in fleet.backend.calls if call.command == "start"] == []


async def prepared_in_shards(fleet: Stand) -> tuple[list[dict[str, Any]], list[LaunchRanksOutput]]:
    """Prepare two shards of two nodes; return the orders that start each, and what was answered."""
    slots = fleet.launch_input().slots
    shards = [
        {"slots": slots[:2], "first_group_rank": 0},
        {"slots": slots[2:], "first_group_rank": 2},
    ]
    outputs = [await fleet.launch(**shard, prepare_only=True) for shard in shards]
    gang = make_gang([node for output in outputs for node in output.prepared])
    orders = [
        {**shard, "prepared": output.prepared, "gang": gang}
        for shard, output in zip(shards, outputs, strict=True)
    ]
    return orders, outputs


def answers(fleet: Stand) -> list[Preparation]:
    generations = [
        fleet.backend._node(node.name).job(TOKEN).generations[TOKEN]
        for node in fleet.fleets.known.nodes
    ]
    return [generation.answer for generation in generations]


def written(value: object) -> list[Payload]:
    return list(data_converter().payload_converter.to_payloads([value]))
