"""One node of three lies, through the whole service.

Honest jobs and the fleet go on, it is named, cancel works at any moment.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from temporalio.client import Client

from tests.hostile.service import attack
from tests.workflows.conftest import server

__all__ = ["server"]
pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("ignore:Cannot find activity to cancel"),
]


@pytest.fixture(autouse=True)
def _short_fences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relaunch.job.fencing.FENCE_MARGIN", timedelta(seconds=0.5))


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_lies_of_one_node_harm_only_the_jobs_that_use_it(
    server: Client, tmp_path: Path
) -> None:
    print(await attack(server, tmp_path, messages=40, seed=1))


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", [11])
async def test_ten_thousand_lies_of_a_node_harm_only_jobs_that_use_it(
    server: Client, tmp_path: Path, seed: int
) -> None:
    print(await attack(server, tmp_path, messages=10_000, seed=seed))
