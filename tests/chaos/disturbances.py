"""Victims of the crash matrix that are not killed.

They stand still, run full, are set wrong, and go on later.

    stop shim           SIGSTOP to a node's shim, SIGCONT later; so for the others
    stop supervisor
    stop session        the worker's session on a node
    stop node           everything that belongs to a node: its ranks, shims, supervisors, sessions,
    sshd
    disk full           the file system of a node's state folder has no space left
    disk frozen         it takes no writes: what writes waits, and cannot be killed meanwhile
    disk emptied        everything in the state folder is deleted
    clock node          the wall clock of a node is stepped, forwards or back (hosts of ssh)
    clock controller    that of the worker; with local nodes, which are its children, theirs as well
    policy change       a person shortens the job's lease and fence; in half of the rounds a node is
    cut off then
    flapping link       a node is cut off and comes back, several times
    two servers         another server's worker, with the same namespace, fleet and job name, is
    given the same nodes
    swapped addresses   the fleet file has the addresses of two nodes exchanged, and is applied
    (hosts of ssh)

The disks need root and loop devices, the clocks gcc: where those are missing these victims are left
out, and the program says so. What such a round may cost is not told beforehand: how long things
take decides it. It must end as it should with no two generations alive, no rank started twice, and
one story told everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from temporalio.client import (
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.service import RPCError

from relaunch.backends.local_power import processes_of, signal_all
from relaunch.cli import jobs
from tests.chaos import clocks, disks
from tests.chaos.places import SshPlaces
from tests.chaos.rival import Rival
from tests.chaos.world import FLEET, eventually

if TYPE_CHECKING:
    from tests.chaos.rounds import Round

Undo = Callable[[], Awaitable[None]]
ON_DISKS = ("disk full", "disk frozen", "disk emptied")
ON_CLOCKS = ("clock node", "clock controller")
STOPPED = ("stop shim", "stop supervisor", "stop session", "stop node")
DISTURBANCES = (
    *STOPPED,
    *ON_DISKS,
    *ON_CLOCKS,
    "policy change",
    "flapping link",
    "two servers",
    "swapped addresses",
)
ONLY_SSH = ("clock node", "swapped addresses")
MAX_FROZEN_S = 6.0
"""Shorter than a node needs to be lost and fenced (9.5 s): a rank in a write that hangs cannot be
killed, and holds its lock."""
CLOCK_STEPS_S = (-3600.0, -180.0, 30.0, 180.0, 3600.0)


def find_obstacle(victim: str) -> str | None:
    """Return why there can be no such victim here; None: there can."""
    if victim in ON_DISKS:
        return disks.find_obstacle()
    return clocks.find_obstacle() if victim in ON_CLOCKS else None


async def disturb(round: Round, node: str) -> Undo:
    """Disturb the victim of a round on a node; return what makes it good again."""
    match round.victim:
        case "stop shim" | "stop supervisor" | "stop session" | "stop node":
            return await _stop(round, node)
        case "disk full" | "disk frozen" | "disk emptied":
            return await _spoil_disk(round, node)
        case "clock node":
            return _step_clock(round, node)
        case "clock controller":
            return _step_clock(round, "worker")
        case "policy change":
            return await _change_policy(round, node)
        case "flapping link":
            return await _flap(round, node)
        case "two servers":
            return await _compete(round)
        case _:
            return await _swap_addresses(round)


async def _stop(round: Round, node: str) -> Undo:
    kind = round.victim.removeprefix("stop ")

    async def find() -> list[int]:
        return _find(round, kind, node)

    with contextlib.suppress(AssertionError):  # it may have ended already, or not have begun
        await eventually(find, f"no {kind} lives on {node}", 3.0, 0.005)
    stopped: set[int] = set()
    while new := set(_find(round, kind, node)) - stopped:
        signal_all(new, signal.SIGSTOP)
        stopped |= new
    round.note(f"stopped {kind} on {node}: {sorted(stopped)}")
    if kind == "node":
        round.paused |= stopped

    async def resume() -> None:
        signal_all(stopped, signal.SIGCONT)
        round.note(f"{kind} on {node} goes on")

    return resume


def _find(round: Round, kind: str, node: str) -> list[int]:
    match kind:
        case "shim" | "supervisor":
            pid = round.job.agent_pid(node, kind)
            return [] if pid is None else [pid]
        case "session":
            return round.world.sessions(node)[:1]
        case _:
            places, state = round.world.places, round.world.node(node)
            servers = places.hosts[node].servers() if isinstance(places, SshPlaces) else []
            ours = processes_of(state, b"RELAUNCH_NODE_STATE") | processes_of(
                state, b"RELAUNCH_AGENT_STATE"
            )
            return [*ours, *servers]


async def _spoil_disk(round: Round, node: str) -> Undo:
    disk, what = round.world.disks_of[node], round.victim.removeprefix("disk ")
    round.note(f"the disk of {node} is {what}")

    async def nothing() -> None:
        pass

    async def free() -> None:
        disk.free()

    async def thaw() -> None:
        disk.thaw()

    match what:
        case "full":
            disk.fill()
            return free
        case "frozen":
            disk.freeze()
            return thaw
        case _:
            disk.empty()
            return nothing


def _step_clock(round: Round, whose: str) -> Undo:
    stepped, seconds = round.world.clocks_of[whose], round.random.choice(CLOCK_STEPS_S)
    stepped.step_wall(seconds)
    round.note(f"the wall clock of {whose} stepped by {seconds:g} s")

    async def back() -> None:
        stepped.reset_wall()

    return back


async def _change_policy(round: Round, node: str) -> Undo:
    times = {"lease": "1.5s", "fence_after": "0.5s", "stop_grace": "0.5s"}
    change = {"policy": {"timeouts": times}, "reason": "chaos", "by": "chaos"}

    async def send() -> None:
        # The job has ended, its server is away, or nothing answered until `wait` gave up: the SDK
        # raises a separate error for a cancelled call.
        with contextlib.suppress(
            RPCError, WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError
        ):
            await jobs.handle_of(round.world.client, round.job.name).execute_update(
                "change_policy", change
            )

    # While no worker runs nothing answers: it is done as soon as one does.
    sent = asyncio.create_task(send())
    await asyncio.wait([sent], timeout=1.0)
    round.note(
        f"the policy is changed to {times}: {'answered' if sent.done() else 'no answer yet'}"
    )
    if round.random.random() < 0.5:
        round.cut_off_node(node)

    async def wait() -> None:
        try:
            async with asyncio.timeout(20):
                await sent
        except TimeoutError:
            round.note("the change of the policy was never answered")

    return wait


async def _flap(round: Round, node: str) -> Undo:
    for _ in range(round.random.randint(2, 5)):
        round.cut_off_node(node)
        await asyncio.sleep(round.moment(4.0))
        round.world.places.heal(node)
        round.note(f"{node} is back")
        await asyncio.sleep(round.moment(1.5))
    round.cut_off_node(node)

    async def nothing() -> None:
        pass  # every node is healed afterwards

    return nothing


async def _compete(round: Round) -> Undo:
    rival = round.world.rival = round.world.rival or Rival(round.world)
    await rival.start()
    await rival.submit(round.job.name, round.world.nodes)
    phase = await rival.await_launch(round.job.name)
    round.note(f"another server has a job {round.job.name}, too, which is {phase}")
    return rival.withdraw


async def _swap_addresses(round: Round) -> Undo:
    world = round.world
    named, _ = world.places.described()
    lines = {
        str(line["name"]): {key: line[key] for key in ("address", "port", "network")}
        for line in named
    }
    world.write_fleet({"n1": lines["n2"], "n2": lines["n1"]})
    _, said = await world.run_starter("nodes", "apply", "--reason", "chaos", "--fleet", FLEET)
    round.note(f"addresses of n1 and n2 swapped: {' '.join(said.split())[:160]}")

    async def back() -> None:
        world.write_fleet()

        async def applied() -> bool:
            # A worker that is busy may not answer in time; the command says so, and that it has to
            # be given again.
            code, said = await world.run_starter(
                "nodes", "apply", "--reason", "chaos is over", "--fleet", FLEET
            )
            round.note(f"addresses as before: {' '.join(said.split())[:160]}")
            return code == 0

        await eventually(applied, "the fleet file was never applied again")

    return back
