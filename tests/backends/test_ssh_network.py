"""Networks that fail under a watch, between machines with separate networks.

What is lost comes back, and no rank dies of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from relaunch.backends.base import Peer, Preparation, StartOrder, Unreachable
from relaunch.backends.ssh import backend as ssh_backend
from relaunch.backends.ssh import connection
from relaunch.backends.ssh.backend import SshBackend
from relaunch.spec.fleet import FleetSpec
from tests.backends.netns import CONTROL, TRAINING, Network
from tests.backends.ssh_site import Site
from tests.backends.test_contract import (
    PATIENCE,
    SECRET,
    heartbeats,
    observed,
    prepare_order,
    read,
    token,
)
from tests.backends.test_ssh_lost import lives, train


class Lab:
    """Servers on the nodes of a network, and a backend over them."""

    def __init__(self, network: Network, site: Site) -> None:
        self.network = network
        self.site = site
        self.hosts = []
        for number in range(1, len(network.nodes) + 1):
            host = site.host(start=False, known=False)
            host.address, host.port, host.within = (
                f"{CONTROL}.{10 + number}",
                22,
                network.inside(number),
            )
            site.know(f"{host.address} {' '.join(host.public_keys[0].split()[:2])}\n")
            self.hosts.append(host.start())
        nodes = [
            {"name": f"n{number}", "address": host.address, "network": f"{TRAINING}.{10 + number}"}
            for number, host in enumerate(self.hosts, 1)
        ]
        ssh = {
            "key": str(site.key),
            "known_hosts": str(site.known_hosts),
            "config": str(site.config),
        }
        self.spec = FleetSpec.model_validate(
            {"name": "lab", "backend": "ssh", "nodes": nodes, "ssh": ssh}
        )

    def run(
        self, work: Callable[[SshBackend], Awaitable[None]], answer_within: float = 1.0
    ) -> None:
        async def inside() -> None:
            backend = SshBackend(self.spec, self.site.agent, answer_within)
            try:
                await work(backend)
            finally:
                await backend.close()

        self.network.run(inside)


@pytest.fixture
def lab(
    tmp_path: Path, agent: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Lab]:
    # A test waits for the next try, and not for what a person would think polite.
    monkeypatch.setattr(ssh_backend, "BACKOFF", (0.2, 0.5))
    network = Network(getattr(request, "param", 1))
    site = Site(tmp_path, agent)
    try:
        yield Lab(network, site)
    finally:
        for host in site.hosts:
            host.close()
        network.close()


async def until_broken(backend: SshBackend, breaks: Callable[[], None]) -> str:
    """Watch n1 until a heartbeat has come, break something, and return why the watch ended."""

    broken = False

    async def watch() -> None:
        nonlocal broken
        async with asyncio.timeout(60), backend.watch("n1", token(1), 0, 0.2) as stream:
            async for line in stream.lines():
                if "heartbeat" in line and not broken:
                    broken = True
                    breaks()

    while True:
        with pytest.raises(Unreachable) as lost:
            await watch()
        if broken:  # else a loaded machine took too long for its first heartbeat
            return lost.value.reason


async def until_back(backend: SshBackend) -> None:
    """See a heartbeat of n1 again."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            lines = await read(backend, token(1), lambda lines: len(heartbeats(lines)) == 1)
        except Unreachable:
            assert time.monotonic() < until
            await asyncio.sleep(0.05)
        else:
            assert heartbeats(lines)[0]["alive"] == [0] and observed(lines) == []
            return


@pytest.mark.parametrize("seconds", [4.0, pytest.param(30.0, marks=pytest.mark.long)])
def test_s2_4_a_network_that_loses_everything_is_read_as_that(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(connection, "TCP", 1.0)

    async def story(backend: SshBackend) -> None:
        pid = await train(backend, f"{TRAINING}.11")
        said = await until_broken(backend, lambda: lab.network.lose(1))
        assert "within 0.8 s" in said
        until = time.monotonic() + seconds
        said = set()
        silence = f"{CONTROL}.11:22 gave no answer to TCP within 1 s"
        while time.monotonic() < until or silence not in said:
            assert time.monotonic() < until + PATIENCE, said
            with pytest.raises(Unreachable) as lost:
                await backend.list("n1")
            said.add(lost.value.reason)
            await asyncio.sleep(0.1)
        assert lives(pid)
        lab.network.heal(1)
        await until_back(backend)
        assert lives(pid)

    lab.run(story)


def test_s2_4_a_node_whose_answers_get_lost_is_only_unreachable(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "TCP", 1.0)

    async def story(backend: SshBackend) -> None:
        pid = await train(backend, f"{TRAINING}.11")
        await until_broken(backend, lambda: lab.network.lose_answers(1))
        with pytest.raises(Unreachable):
            await backend.list("n1")
        assert lives(pid)
        lab.network.heal(1)
        await until_back(backend)

    lab.run(story)


def test_a_node_with_a_link_down_is_one_without_a_route(lab: Lab) -> None:
    async def story(backend: SshBackend) -> None:
        lab.network.unplug(1)
        with pytest.raises(Unreachable) as lost:
            await backend.list("n1")
        assert f" {CONTROL}.11:22: " in lost.value.reason
        lab.network.plug(1)
        async with asyncio.timeout(60):
            while True:
                try:
                    await backend.list("n1")
                    return
                except Unreachable:
                    await asyncio.sleep(0.05)

    lab.run(story)


@pytest.mark.parametrize("lab", [2], indirect=True)
def test_s2_4_peers_meet_on_the_training_network_in_a_cut(lab: Lab) -> None:
    async def story(backend: SshBackend) -> None:
        peers = {}
        stamps = {}
        for rank, node in enumerate(("n1", "n2")):
            address = backend.node(node).network
            assert address is not None
            order = prepare_order(token(1), (rank,), address=address, lease=4.0, fence_after=4.0)
            prepared = await backend.prepare(node, order)
            assert isinstance(prepared, Preparation)
            peers[node], stamps[node] = Peer(node, address, prepared.peer_port), prepared.stamp
        pids = {}
        for rank, (node, other) in enumerate((("n1", "n2"), ("n2", "n1"))):
            order_ = StartOrder(
                token=token(1),
                node=node,
                command=("sleep", "600"),
                workdir=None,
                env={},
                rank_env=({"RANK": str(rank)},),
                peers=(peers[other],),
                prepared=stamps[node],
                secret=SECRET,
                fences=True,
            )
            started = await backend.start(node, order_)
            pids[node] = started.pids[rank]  # type: ignore[union-attr]
        first = await read(
            backend,
            token(1),
            # One renewal could be lost in the cut, and peers extend no lease that has had none.
            lambda lines: len(heartbeats(lines)) == 10,
            node="n2",
            stamp=lambda stamp: stamp,
        )
        lab.network.lose(2)
        began = heartbeats(first)[-1]["stamp"]
        # Twice as long as n2 would live if n1, which is watched, did not tell it that all is
        # well.
        lines = await read(
            backend,
            token(1),
            lambda lines: bool(heartbeats(lines)) and heartbeats(lines)[-1]["stamp"] > began + 16.0,
            stamp=lambda stamp: stamp,
        )
        assert observed(lines) == [] and all(map(lives, pids.values()))

    lab.run(story, answer_within=5.0)
