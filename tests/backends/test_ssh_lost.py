"""A connection that breaks says nothing of the ranks.

They live on, and a watch takes up where it was.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from relaunch.backends.base import (
    Backend,
    Preparation,
    StartedRanks,
    StartOrder,
    StopOrder,
    Unreachable,
)
from tests.backends.ssh_site import Site, reason, site
from tests.backends.sshd import Sshd
from tests.backends.test_contract import heartbeats, observed, prepare_order, reached, read, token

__all__ = ["site"]
pytestmark = pytest.mark.asyncio

Line = Mapping[str, Any]
PATIENCE = 60.0


async def train(backend: Backend, address: str, command: str = "exec sleep 600") -> int:
    """Launch one rank, and return its pid.

    To start an agent takes a loaded machine longer than some tests wait for an answer.
    """
    prepared = await reached(
        lambda: backend.prepare("n1", prepare_order(token(1), (0,), address=address))
    )
    assert isinstance(prepared, Preparation)
    what: dict[str, Any] = {
        "workdir": None,
        "env": {},
        "rank_env": ({"RANK": "0"},),
        "peers": (),
        "secret": "5ec7e7",
        "fences": True,
    }
    order = StartOrder(
        token=token(1),
        node="n1",
        command=("/bin/sh", "-c", command),
        prepared=prepared.stamp,
        **what,
    )
    started = await reached(lambda: backend.start("n1", order))
    assert isinstance(started, StartedRanks)
    return started.pids[0]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


async def watched(
    backend: Backend, host: Sshd, breaks: Callable[[], object], heartbeat: float = 0.2
) -> str:
    """Watch until a heartbeat has come, break the connection, and return why the watch ended."""
    seen = False

    async def watch() -> None:
        nonlocal seen
        async with asyncio.timeout(PATIENCE), backend.watch("n1", token(1), 0, heartbeat) as stream:
            async for line in stream.lines():
                if "heartbeat" in line:
                    seen = True
                    breaks()

    while True:
        with pytest.raises(Unreachable) as broken:
            await watch()
        if seen:  # else a loaded machine took too long for its first heartbeat
            return broken.value.reason


async def test_s2_4_a_killed_sshd_ends_no_rank_and_the_watch_resumes(
    site: Site,
) -> None:
    host = site.host()
    backend = site.backend(host)
    flag = site.folder / "go"
    pid = await train(backend, host.address, f"while [ ! -e {flag} ]; do sleep 0.05; done; exit 3")
    said = await watched(backend, host, host.kill)
    assert said.endswith("(during watch)") and "connection" in said
    async with asyncio.timeout(PATIENCE):
        while "refused the connection" not in await reason(backend):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.05)
    assert lives(pid)
    flag.touch()  # what happens meanwhile is reported afterwards
    host.start()
    lines = await reached(lambda: read(backend, token(1), lambda lines: len(observed(lines)) == 1))
    assert [(one["seq"], one["kind"], one["exit_code"]) for one in observed(lines)] == [
        (1, "RankExited", 3)
    ]
    again = await read(
        backend,
        token(1),
        lambda lines: len(heartbeats(lines)) == 1 or "end" in lines[-1],
        after_seq=1,
    )
    assert observed(again) == []


async def test_s2_4_connections_that_are_cut_at_the_node_end_no_rank(site: Site) -> None:
    host = site.host()
    backend = site.backend(host)
    pid = await train(backend, host.address)

    def cut() -> None:
        assert host.process is not None
        for server in host.servers():
            if server != host.process.pid:
                os.kill(server, signal.SIGKILL)

    await watched(backend, host, cut)
    lines = await reached(
        lambda: read(backend, token(1), lambda lines: len(heartbeats(lines)) == 1)
    )
    assert heartbeats(lines)[0]["alive"] == [0] and lives(pid)


async def test_s2_6_a_frozen_sshd_is_noticed_by_missing_heartbeats(
    site: Site,
) -> None:
    host = site.host()
    backend = site.backend(host, answer_within=1.0)
    pid = await train(backend, host.address)
    said = await watched(backend, host, lambda: host.signal(signal.SIGSTOP))
    assert "within 0.8 s" in said
    assert lives(pid)
    host.signal(signal.SIGCONT)
    lines = await reached(
        lambda: read(backend, token(1), lambda lines: len(heartbeats(lines)) == 1)
    )
    assert heartbeats(lines)[0]["alive"] == [0]


async def test_s2_4_a_master_that_dies_leaves_the_ranks_to_the_next(site: Site) -> None:
    host = site.host()
    pid = await train(first := site.backend(host), host.address)
    await first.close()
    lines = await read(site.backend(host), token(1), lambda lines: len(heartbeats(lines)) == 1)
    assert heartbeats(lines)[0]["alive"] == [0] and lives(pid)


async def test_s2_5_the_state_on_the_node_carries_its_boot(site: Site) -> None:
    host = site.host()
    backend = site.backend(host)
    await train(backend, host.address)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert (await backend.list("n1"))["boot_id"] == boot
    [shim] = host.state.glob("jobs/*/*/shim.json")
    assert boot in shim.read_text()
    await backend.stop("n1", StopOrder(token(1), stop_grace=5.0))


async def test_a_killed_agent_is_started_again_by_the_next_call(site: Site) -> None:
    host = site.host()
    backend = site.backend(host)
    await backend.list("n1")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if os.fsencode(host.state / "agents" / site.agent.name) in words:
                os.kill(int(entry.name), signal.SIGKILL)
    assert (await reached(lambda: backend.list("n1")))["outcome"] == "done"


async def test_nothing_that_lives_on_keeps_the_connection_open(site: Site) -> None:
    """The node's sshd waits until no process holds the channel's pipes: a shim must not."""
    host = site.host()
    backend = site.backend(host)
    await train(backend, host.address)
    assert len(host.servers()) > 1
    await backend.close()
    async with asyncio.timeout(PATIENCE):
        while len(host.servers()) > 1:  # noqa: ASYNC110  (a server sends no event)
            await asyncio.sleep(0.02)
