"""One world for each file of tests: a real server, a real worker, real agents and ranks."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.chaos.world import World


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[World]:
    # Addresses of their own, because files of tests run side by side.
    number = 20 + sum(request.module.__name__.encode()) % 100
    # Three of these run side by side on two cores: an agent may take some seconds to start there.
    async with World(tmp_path_factory.mktemp("e2e") / "world", number, answer_within=5.0) as made:
        yield made
