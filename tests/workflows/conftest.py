"""Servers: a real one, one that soon suggests to continue as new, one that skips time.

And a rig on each.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from relaunch.temporal import SEARCH_ATTRIBUTES, data_converter, ensure_namespace
from tests.servers import start_dev_server, start_time_skipping_server
from tests.workflows.rig import Rig, rig

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".venv" / "bin"
MakeRig = Callable[..., AbstractAsyncContextManager[Rig]]

FAST = (
    "history.transferProcessorMaxPollRPS=1000",
    "history.timerProcessorMaxPollRPS=1000",
    "matching.numTaskqueueReadPartitions=1",
    "matching.numTaskqueueWritePartitions=1",
)
"""As `up` starts its server: the default costs 50 ms a hop, and four parts for each task queue, in
which messages and workers look for each other, a tenth of a test's processor time."""


async def _skipping() -> WorkflowEnvironment:
    environment = await start_time_skipping_server(
        BIN / "temporal-test-server", data_converter=data_converter()
    )
    types = {"Keyword": 2, "Int": 3, "KeywordList": 7}
    wanted: Any = {name: types[kind] for name, kind in SEARCH_ATTRIBUTES.items()}
    await environment.client.operator_service.add_search_attributes(
        AddSearchAttributesRequest(namespace="default", search_attributes=wanted)
    )
    return environment


@pytest_asyncio.fixture(loop_scope="session")
async def skipping() -> AsyncIterator[WorkflowEnvironment]:
    """One for each test, because its clock runs ahead of everybody else's."""
    environment = await _skipping()
    try:
        yield environment
    finally:
        await environment.shutdown()


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def short_server() -> AsyncIterator[Client]:
    """A real server that suggests to continue as new after 15 events."""
    extra = [
        word
        for value in (*FAST, "limit.historyCount.suggestContinueAsNew=15")
        for word in ("--dynamic-config-value", value)
    ]
    async with _dev(extra) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def server() -> AsyncIterator[Client]:
    """A real server with the default limits.

    The one that skips time is not used more than needed: a cancel that crosses an activity's end
    wedges its workflow task (its version 1.40.0), the real one takes it.
    """
    async with dev_server() as client:
        yield client


def dev_server(*values: str) -> AbstractAsyncContextManager[Client]:
    """A server with these values of its dynamic configuration."""
    return _dev([word for value in (*FAST, *values) for word in ("--dynamic-config-value", value)])


class _dev:
    def __init__(self, extra: list[str]) -> None:
        self._extra = extra

    async def __aenter__(self) -> Client:
        self._environment = await start_dev_server(
            dev_server_extra_args=self._extra, data_converter=data_converter()
        )
        await ensure_namespace(self._environment.client)
        return self._environment.client

    async def __aexit__(self, *_: object) -> None:
        await self._environment.shutdown()


@pytest.fixture
def make_rig(server: Client, tmp_path: Path) -> MakeRig:
    return partial(rig, server, tmp_path)


@pytest.fixture
def make_uncached_rig(server: Client, tmp_path: Path) -> MakeRig:
    """A rig whose workflows are never kept: each task replays all that came before it."""
    return partial(rig, server, tmp_path, cached=0)


@pytest.fixture
def make_short_rig(short_server: Client, tmp_path: Path) -> MakeRig:
    return partial(rig, short_server, tmp_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # The SDK warns when a cancel arrives for an activity that has just ended, from its own poll
        # loop: an error there ends the worker.
        item.add_marker(pytest.mark.filterwarnings("ignore:Cannot find activity to cancel"))
