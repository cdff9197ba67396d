"""One world for the tests of a process: a real server, a real worker, real agents and ranks.

Starting a server and a worker costs as much as several tests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests import planted
from tests.chaos.world import World


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def shared_world(
    tmp_path_factory: pytest.TempPathFactory, worker_id: str
) -> AsyncIterator[World]:
    # Addresses of their own, because several processes run tests side by side.
    number = 20 + int(worker_id.removeprefix("gw").replace("master", "0"))
    # Three of these run side by side on two cores: an agent may take some seconds to start there.
    async with World(tmp_path_factory.mktemp("e2e") / "world", number, answer_within=5.0) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def world(shared_world: World) -> AsyncIterator[World]:
    yield shared_world
    await shared_world.restore()


@pytest.fixture(autouse=True)
def secrets_stay_secret(tmp_path: Path) -> Iterator[None]:
    """Search for the secret that jobs have in what every test has written and left running."""
    yield
    planted.search(tmp_path)
