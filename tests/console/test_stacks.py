"""`relaunch stacks`, with a worker whose ranks are doubles."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from syrupy.assertion import SnapshotAssertion
from temporalio import activity
from temporalio.worker import Worker

from relaunch.messages.ids import TASK_QUEUE
from relaunch.messages.logs import RankGroup, ReadStacksInput, ReadStacksOutput, Stack
from relaunch.temporal import ensure_namespace
from tests.console.commands import Place, one_sentence
from tests.console.fake_job import FakeTrainingJob
from tests.pages import sections


@activity.defn
async def read_stacks(input: ReadStacksInput) -> ReadStacksOutput:
    return ReadStacksOutput(
        tuple(
            Stack(
                rank, node, 40 + rank, f"Thread {rank}\n  forward", "is in forward (model.py:3)", 0
            )
            for node, rank in input.places
        ),
        (
            RankGroup(
                "ranks 0-1 on local-1, local-2 (2): are in forward (model.py:3)",
                ("forward (model.py:3)", "train (train.py:9)"),
            ),
        ),
    )


@pytest.fixture
async def place(bare: Place) -> AsyncIterator[Place]:
    await ensure_namespace(bare.client)
    async with Worker(
        bare.client, task_queue=TASK_QUEUE, workflows=[FakeTrainingJob], activities=[read_stacks]
    ):
        yield bare


async def test_stacks_are_printed_by_rank_with_the_node_and_the_pid(
    place: Place, page: SnapshotAssertion
) -> None:
    assert (await place.starter("submit", place.write_job("llama"))).code == 0
    done = await place.starter("stacks", "llama")
    whole = await place.starter("stacks", "llama", "--rank", "1")
    assert sections({"all": done.out, "--rank 1": whole.out}) == page, done.err
    one = await place.starter("stacks", "llama", "--rank", "1", "--json")
    (stack,) = json.loads(one.out)
    assert (stack["rank"], stack["node"], stack["pid"]) == (1, "local-2", 41)
    assert (stack["where"], stack["group"]) == ("is in forward (model.py:3)", 0)
    assert stack["text"].splitlines()[0] == "Thread 1"
    one_sentence(
        await place.starter("stacks", "llama", "--rank", "2"),
        "llama",
        "rank 2",
        "0 to 1",
    )
    one_sentence(await place.starter("stacks", "missing"), "missing")
