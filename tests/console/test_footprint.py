"""What keeps relaunch cheap while nothing happens, where a test would not notice otherwise."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from temporalio.worker import Worker

from relaunch.cli import follow, jobs
from relaunch.cli.database import DATABASE
from relaunch.cli.service import has_one_partition
from relaunch.messages.ids import TASK_QUEUE
from relaunch.temporal import ensure_namespace
from tests.console.commands import Place
from tests.console.fake_job import FakeTrainingJob

HOUR = 3600.0


@pytest.fixture
async def place(bare: Place) -> AsyncIterator[Place]:
    await ensure_namespace(bare.client)
    async with Worker(bare.client, task_queue=TASK_QUEUE, workflows=[FakeTrainingJob]):
        yield bare


@pytest.mark.long
async def test_a_followed_job_is_looked_at_for_events_only(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    load_job = jobs.load_job

    async def count(*arguments: object) -> jobs.JobSnapshot:
        nonlocal looks
        looks += 1
        return await load_job(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(jobs, "load_job", count)
    await place.starter("submit", place.write_job("followed", "wait"))
    seen = follow.watch(place.client, "followed", HOUR)
    now = await anext(seen)
    assert now.open
    events = now.history_length
    # An event is reported at once: nothing else would end this within the hour.
    await place.starter("cancel", "followed", "--reason", "seen enough")
    rest = [now async for now in seen]
    assert not rest[-1].open
    assert looks <= 2 + rest[-1].history_length - events


async def test_a_feed_without_news_waits_until_its_time_is_over(place: Place) -> None:
    await place.starter("submit", place.write_job("quiet", "wait"))
    run = await jobs.describe(place.client, "quiet")
    feed = follow.EventFeed(place.client, "quiet", run.run_id)
    try:
        await feed.wait(HOUR)  # the events until now
        await feed.wait(0.01)
        assert not feed.is_over
    finally:
        feed.close()


def test_only_a_database_that_has_begun_so_has_one_partition(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
    (old / DATABASE).touch()
    assert not has_one_partition(old)
    assert has_one_partition(new)
    (new / DATABASE).touch()
    assert has_one_partition(new), "also when the server starts again"
