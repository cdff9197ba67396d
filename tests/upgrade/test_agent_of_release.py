"""A job that imports ahead, on nodes whose agent is that of a release which cannot."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from relaunch.backends import artifact
from relaunch.backends.base import PrepareOrder, Refusal, StartOrder, StopOrder, WarmOrder
from relaunch.backends.pipe import ProcessPipe
from relaunch.backends.session import NOT_AHEAD, AgentSession
from relaunch.generation import Token
from tests.chaos.rounds import CUTS
from tests.chaos.world import RANK_PROGRAM, World, chaos_policy

PROGRAM: Any = {"workdir": None, "env": {}, "rank_env": ({},), "command": ("sleep", "1000")}
START: Any = {
    **PROGRAM,
    "secret": "00",
    "fences": False,
    "unwatched": None,
    "log_pattern": None,
}


def make_session(folder: Path) -> AgentSession:
    """Return a session with the agent of a node, built from the package that is set."""
    agent = artifact.build_agent(folder)
    environment = {**os.environ, "RELAUNCH_AGENT_STATE": str(folder / "n1")}

    async def connect() -> ProcessPipe:
        return await ProcessPipe.start(sys.executable, str(agent), "session", env=environment)

    return AgentSession("n1", connect, 30.0)


async def test_an_agent_of_a_release_imports_nothing_ahead(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact, "_PACKAGE", package / "relaunch")
    (tmp_path / "n1").mkdir(mode=0o700)
    session = make_session(tmp_path)
    token = Token("default", "j", 1, 1)
    ahead = WarmOrder(token=token, fleet="", keep=60.0, modules=("json",), **PROGRAM)
    refused = await session.warm(ahead)
    assert isinstance(refused, Refusal)
    assert (refused.why, refused.reason) == ("unknown_order", NOT_AHEAD)
    times = {"lease": 30.0, "fence_after": 1.0, "stop_grace": 1.0, "valid_for": 30.0}
    prepared = await session.prepare(PrepareOrder(token, "127.0.0.1", (0,), heartbeat=1.0, **times))
    assert not isinstance(prepared, Refusal)
    order = StartOrder(
        token=token, node="n1", peers=(), prepared=prepared.stamp, warm=("json",), **START
    )
    try:
        started = await session.start(order)
        assert not isinstance(started, Refusal)
        assert (len(started.pids), started.cold) == (1, NOT_AHEAD)
    finally:
        await session.stop(StopOrder(token, stop_grace=0.0))
        await session.close()


async def test_an_agent_of_a_release_starts_what_this_one_prepared(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of the release was put back in place between the two orders."""
    (tmp_path / "n1").mkdir(mode=0o700)
    token = Token("default", "j", 1, 1)
    times = {"lease": 30.0, "fence_after": 1.0, "stop_grace": 1.0, "valid_for": 30.0}
    prepare = PrepareOrder(token, "127.0.0.1", (0,), heartbeat=1.0, **times)
    own = make_session(tmp_path)
    prepared = await own.prepare(prepare)
    await own.close()
    assert not isinstance(prepared, Refusal)
    monkeypatch.setattr(artifact, "_PACKAGE", package / "relaunch")
    session = make_session(tmp_path)
    try:
        assert await session.prepare(prepare) == prepared
        started = await session.start(
            StartOrder(token=token, node="n1", peers=(), prepared=prepared.stamp, **START)
        )
        assert not isinstance(started, Refusal)
        assert len(started.pids) == 1
    finally:
        await session.stop(StopOrder(token, stop_grace=0.0))
        await session.close()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["local", "ssh"])
async def test_a_job_starts_cold_where_an_agent_of_a_release_is(
    package: Path, tmp_path: Path, backend: str, worker_id: str
) -> None:
    """After a kill in place, and on a spare after the loss of a node."""
    number = 60 + int(worker_id.removeprefix("gw").replace("master", "0"))
    worker = (sys.executable, "-m", "tests.upgrade.agent_of", str(package))
    async with World(
        tmp_path / "world",
        number,
        spares=1,
        backend=backend,
        answer_within=5.0,
        worker_program=worker,
    ) as world:
        folder = world.folder / "jobs" / "old"
        job = await world.submit(
            name="old",
            command=[sys.executable, str(RANK_PROGRAM), str(folder)],
            warm=["decimal"],
            policy=chaos_policy(hang={"after": "12s", "first_step": "30s"}),
        )
        await job.until_phase("RUNNING")
        await job.until_watched()
        for generation in (2, 3):
            if generation == 2:
                os.kill(job.rank_pids("n2")[0], signal.SIGKILL)
            else:
                world.places.cut("n2", CUTS["cut both"], freeze_ranks=True)
            await job.until_phase("RUNNING", generation=generation)
            await job.until_watched()
            state = await job.state()
            nodes = [slot.node for slot in state.slots]
            assert nodes == ["n1", "n3" if generation == 3 else "n2"]
            assert state.generation == generation
        world.places.heal("n2")
        said = world.worker.log.read_text()
        for generation, nodes in ((1, "n1, n2"), (2, "n1, n2"), (3, "n1, n3")):
            cold = f"its ranks on {nodes} were started from nothing: {NOT_AHEAD}"
            assert f"generation {generation} runs on {nodes}; {cold}" in said
        assert f"job old: spare n3: not warm: {NOT_AHEAD}" in said
        assert not list(world.folder.rglob("standby.json"))
        job.let_end()
        await job.until_phase("SUCCEEDED")
        assert job.lines("violations") == []
        await world.tidy(job)
