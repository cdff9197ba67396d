"""The background tasks of a job's workflow: which error counts, and which task is waited for."""

from __future__ import annotations

import asyncio

import pytest

from relaunch.workflows.training_job.session import Tasks

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def fail() -> None:
    raise ValueError("boom")


async def fail_when_cancelled() -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        raise ValueError("while it was cancelled") from None


async def wait() -> None:
    await asyncio.Event().wait()


async def test_an_error_of_any_task_is_found_and_kept_until_the_end() -> None:
    tasks = Tasks()
    tasks.start("watch", fail(), waits=True)
    await asyncio.sleep(0)
    tasks.start("act", asyncio.sleep(0))
    await asyncio.sleep(0)
    assert str(tasks.find_error()) == "boom"


async def test_a_cancelled_task_has_no_error_that_counts() -> None:
    tasks = Tasks()
    for work in (wait(), fail_when_cancelled()):
        task = tasks.start("act", work)
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.wait(tasks.busy)
    assert tasks.find_error() is None


async def test_what_only_waits_is_not_busy() -> None:
    tasks = Tasks()
    watch = tasks.start("watch", wait(), waits=True)
    order = tasks.start("act", wait())
    assert tasks.busy == [order]
    assert tasks.is_running("act") and tasks.is_running("watch")
    for task in (watch, order):
        task.cancel()
    await asyncio.wait((watch, order))
    assert tasks.busy == [] and not tasks.is_running("act")
