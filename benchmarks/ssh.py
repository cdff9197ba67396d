"""Many nodes by SSH in one worker: what connections cost, and how soon a dead rank is noticed.

    python -m benchmarks.ssh [--nodes 64] [--kills 64] [--idle 30] [--round-trip 0] [--output FILE]

Nodes of this machine are measured the same way, for comparison. Each node is an OpenSSH server with
one rank, on loopback. The network costs nothing; with --round-trip it costs so many milliseconds,
by a relay before each sshd (without loss and without a limit of bandwidth). Each backend is in a
separate process, which does what a worker does, without Temporal. sshd is counted separately, and
so is what runs on the nodes (agents, their shims and supervisors).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import resource
import signal
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks.idle import TICK, pss, ticks
from relaunch.backends.artifact import build_agent
from relaunch.backends.base import (
    Backend,
    Preparation,
    PrepareOrder,
    StartedRanks,
    StartOrder,
    Unreachable,
)
from relaunch.backends.local import LocalBackend
from relaunch.backends.local_power import signal_all
from relaunch.generation import Token
from relaunch.spec.fleet import FleetSpec
from relaunch.spec.policy import preset
from tests.backends.slow_link import Way, slow_links
from tests.backends.sshd import OPENSSH, Sshd, make_key
from tests.chaos.places import environments

TIMES = preset("default").timeouts
TOKEN = Token("default", "bench", 1, 1)
ANSWER_TIMEOUT = 60.0
"""Seconds. Agents, sshd and worker share the machine here, which those of a fleet do not."""
SETTLE = 5.0
"""Seconds until what was started does no more than it always does."""
PAUSE = (0.05, 0.25)
"""Seconds between two kills, so that none falls in with something that happens in step."""


@dataclass(frozen=True, slots=True)
class Measured:
    nodes: int
    first_connect: float
    """Seconds until all have answered `list`, the agent sent to each."""
    connect: float
    """The same when the agent is there."""
    connect_cpu: float
    """Of that, processor seconds of the worker."""
    idle_cpu: float
    """Per cent of one core, of the worker."""
    sshd_cpu: float
    nodes_cpu: float
    memory: float
    """MiB of the worker (PSS) before anything is connected, and with all watches open."""
    memory_watching: float
    sshd_memory: float
    nodes_memory: float
    noticed: tuple[float, ...]
    """Milliseconds from the kill of a rank to the line of its node's watch."""


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def reach(backend: Backend, nodes: list[str]) -> tuple[float, float]:
    began, used = time.monotonic(), cpu()

    async def listed(node: str) -> None:
        while True:
            try:
                await backend.list(node)
                return
            except Unreachable as error:
                sys.stderr.write(f"{error}\n")
                await asyncio.sleep(0.5)

    await asyncio.gather(*(listed(node) for node in nodes))
    return time.monotonic() - began, cpu() - used


async def launch(backend: Backend, node: str) -> int:
    durations = {
        name: getattr(TIMES, name).total_seconds()
        for name in ("lease", "fence_after", "stop_grace", "heartbeat")
    }
    prepared = await backend.prepare(
        node,
        PrepareOrder(token=TOKEN, address="127.0.0.1", ranks=(0,), valid_for=120.0, **durations),
    )
    assert isinstance(prepared, Preparation), prepared
    order = StartOrder(
        token=TOKEN,
        node=node,
        command=("sleep", "3600"),
        workdir=None,
        env={},
        rank_env=({"RANK": "0"},),
        peers=(),
        prepared=prepared.stamp,
        secret="5ec7e7",
        fences=False,
    )
    started = await backend.start(node, order)
    assert isinstance(started, StartedRanks), started
    return started.pids[0]


async def measure(
    kind: str,
    spec: FleetSpec,
    folder: Path,
    agent: Path,
    states: list[Path],
    servers: list[int],
    idle: float,
    kills: int,
) -> Measured:
    """Servers: the listening sshds; their connections are their children."""
    nodes = [node.name for node in spec.nodes]

    def backend() -> Backend:
        if kind == "local":
            return LocalBackend(spec, folder, agent, ANSWER_TIMEOUT)
        # Counted as memory of what is connected: a worker of local nodes does not import it.
        from relaunch.backends.ssh.backend import SshBackend

        return SshBackend(spec, agent, ANSWER_TIMEOUT)

    memory = pss(os.getpid())
    first = backend()
    first_connect, _ = await reach(first, nodes)
    await first.close()
    async with asyncio.timeout(600):
        used = backend()
        connect, connect_cpu = await reach(used, nodes)
        pids = dict(
            zip(nodes, await asyncio.gather(*(launch(used, node) for node in nodes)), strict=True)
        )
        seen: dict[str, asyncio.Future[float]] = {
            node: asyncio.get_running_loop().create_future() for node in nodes
        }
        beating = {node: asyncio.Event() for node in nodes}

        async def watch(node: str) -> None:
            async with used.watch(node, TOKEN, 0, TIMES.heartbeat.total_seconds()) as stream:
                async for line in stream.lines():
                    if "heartbeat" in line:
                        beating[node].set()
                        await stream.renew(line["heartbeat"]["stamp"])
                    elif line.get("observation", {}).get("kind") == "RankExited":
                        seen[node].set_result(time.monotonic())

        watches = [asyncio.create_task(watch(node)) for node in nodes]
        await asyncio.gather(*(event.wait() for event in beating.values()))
        await asyncio.sleep(SETTLE)
        there = on_nodes(states)
        mine = {pid for listening in servers for pid in below(listening)} - there
        there -= {*pids.values()}
        before = (cpu(), sum(map(ticks, mine)), sum(map(ticks, there)))
        await asyncio.sleep(idle)
        after = (cpu(), sum(map(ticks, mine)), sum(map(ticks, there)))
        own, of_sshd, of_nodes = (
            100 * (late - early) / idle / scale
            for early, late, scale in zip(before, after, (1, TICK, TICK), strict=True)
        )
        memories = [pss(os.getpid()), sum(map(pss, mine)), sum(map(pss, there))]
        noticed = []
        for node in random.sample(nodes, min(kills, len(nodes))):
            await asyncio.sleep(random.uniform(*PAUSE))
            at = time.monotonic()
            os.kill(pids[node], signal.SIGKILL)
            noticed.append(1000 * (await seen[node] - at))
        for task in watches:
            task.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        await used.close()
    return Measured(
        nodes=len(nodes),
        first_connect=first_connect,
        connect=connect,
        connect_cpu=connect_cpu,
        idle_cpu=own,
        sshd_cpu=of_sshd,
        nodes_cpu=of_nodes,
        memory=memory / 1024,
        memory_watching=memories[0] / 1024,
        sshd_memory=memories[1] / 1024,
        nodes_memory=memories[2] / 1024,
        noticed=tuple(noticed),
    )


def on_nodes(states: list[Path]) -> set[int]:
    wanted = {
        f"RELAUNCH_{whose}_STATE={state}".encode()
        for whose in ("NODE", "AGENT")
        for state in states
    }
    return {pid for pid, variables in environments() if not wanted.isdisjoint(variables)}


def below(pid: int) -> set[int]:
    """A process and its descendants."""
    found, waiting = set(), [pid]
    while waiting:
        found.add(one := waiting.pop())
        try:
            waiting += [
                int(child) for child in Path(f"/proc/{one}/task/{one}/children").read_text().split()
            ]
        except OSError:
            continue
    return found


def in_own_process(*arguments: object) -> Measured:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run, *arguments).result()


def run(*arguments: object) -> Measured:
    return asyncio.run(measure(*arguments))  # type: ignore[arg-type]


NEAR = 61
"""Where the far end of a slow link listens: 127.61.…"""


def address(number: int, network: int = 60) -> str:
    return f"127.{network}.{number // 200}.{1 + number % 200}"


def fleet(kind: str, nodes: list[dict[str, object]], **more: object) -> FleetSpec:
    return FleetSpec.model_validate({"name": "bench", "backend": kind, "nodes": nodes, **more})


def local(folder: Path, agent: Path, count: int, idle: float, kills: int) -> Measured:
    names = [f"n{number}" for number in range(1, count + 1)]
    spec = fleet(
        "local",
        [
            {"name": name, "address": address(number), "gpus": 0}
            for number, name in enumerate(names, 1)
        ],
    )
    states = [folder / "nodes" / name for name in names]
    for state in states:
        state.mkdir(parents=True, mode=0o700)
        (state / "jobs").mkdir()  # else a local node on which nothing ever ran is not asked
    try:
        return in_own_process("local", spec, folder, agent, states, [], idle, kills)
    finally:
        end_all(folder)


def ssh(folder: Path, agent: Path, count: int, idle: float, kills: int, delay: float) -> Measured:
    """With `delay`, each byte comes so many seconds late, either way."""
    key, known_hosts, config = (
        make_key(folder / "key"),
        folder / "known_hosts",
        folder / "ssh_config",
    )
    config.touch()
    hosts: list[Sshd] = []
    try:
        for number in range(1, count + 1):
            hosts.append(Sshd(folder / f"n{number}", address(number), key))
            hosts[-1].start()
        ways = [
            Way((address(number, NEAR), host.port), (host.address, host.port))
            for number, host in enumerate(hosts, 1)
        ]
        reached = [way.near if delay else way.far for way in ways]
        known_hosts.write_text(
            "".join(
                host.known_hosts.replace(host.address, at)
                for host, (at, _) in zip(hosts, reached, strict=True)
            )
        )
        nodes: list[dict[str, object]] = [
            {"name": f"n{number}", "address": at, "port": port, "gpus": 0}
            for number, (at, port) in enumerate(reached, 1)
        ]
        spec = fleet(
            "ssh",
            nodes,
            ssh={"key": str(key), "known_hosts": str(known_hosts), "config": str(config)},
        )
        servers = [host.process.pid for host in hosts if host.process is not None]
        with slow_links(ways if delay else (), delay):
            return in_own_process(
                "ssh", spec, folder, agent, [host.state for host in hosts], servers, idle, kills
            )
    finally:
        for host in hosts:
            if host.process is not None:
                host.process.kill()
                host.process.wait()
        end_all(folder)


def end_all(folder: Path) -> None:
    """Kill everything that runs on any node in `folder`, all at once.

    Ending 64 nodes one by one, as tests do, would take minutes.
    """
    under = tuple(f"RELAUNCH_{whose}_STATE={folder}/".encode() for whose in ("NODE", "AGENT"))
    while True:
        found = [
            pid
            for pid, variables in environments()
            if any(one.startswith(under) for one in variables)
        ]
        if not found:
            return
        signal_all(found, signal.SIGKILL)
        time.sleep(0.05)


def describe(kind: str, one: Measured) -> str:
    noticed = sorted(one.noticed)
    each = (one.memory_watching - one.memory) / one.nodes
    lines = (
        f"{kind}, {one.nodes} nodes",
        f"all connected: {one.first_connect:.1f} s the first time, "
        f"{one.connect:.1f} s when the agent is there",
        f"processor for that: {one.connect_cpu:.1f} s",
        f"idle, watches open: {one.idle_cpu:.1f} % of a core; sshd {one.sshd_cpu:.1f} %, "
        f"on the nodes {one.nodes_cpu:.1f} %",
        f"memory: {one.memory_watching:.0f} MiB, before {one.memory:.0f} ({each:.2f} a node)",
        f"memory of sshd {one.sshd_memory:.0f} MiB, on the nodes {one.nodes_memory:.0f} MiB",
        f"rank killed until noticed, {len(noticed)} times: "
        f"median {statistics.median(noticed):.1f} ms, {noticed[0]:.1f}–{noticed[-1]:.1f}",
    )
    return "\n  ".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ssh", description=__doc__)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--kills", type=int, default=64, help="at most one on each node")
    parser.add_argument("--idle", type=float, default=30.0, help="seconds")
    parser.add_argument(
        "--round-trip",
        type=float,
        default=0.0,
        help="milliseconds that a network between worker and nodes would take",
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if OPENSSH is None:
        sys.stdout.write(
            "no sshd on this machine (package openssh-server): nodes by SSH are not measured\n"
        )
        return
    found: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory(prefix="relaunch-ssh-") as temporary:
        agent = build_agent(Path(temporary) / "agent")
        for kind, of in (
            ("local", local),
            ("ssh", partial(ssh, delay=arguments.round_trip / 2000)),
        ):
            sys.stdout.write(f"load before: {os.getloadavg()[0]:.1f}\n")
            folder = Path(temporary) / kind
            folder.mkdir()
            found[kind] = of(folder, agent, arguments.nodes, arguments.idle, arguments.kills)
            sys.stdout.write(describe(kind, found[kind]))
            sys.stdout.flush()
    if arguments.output:
        arguments.output.write_text(
            json.dumps({kind: asdict(one) for kind, one in found.items()}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
