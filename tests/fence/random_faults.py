"""Rounds of random cuts, loss, delay and frozen processes under random time-outs."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable

from relaunch.backends.local_power import signal_all
from tests.chaos.world import chaos_policy
from tests.fence.attacks import Attempt
from tests.fence.hosts import Host

NAME = "random"
WORLD = {"nodes": 3, "spares": 2}
HARM_S = 14.0
"""Seconds in which harm is done: about a lease and a fence."""
LAUNCH_S = 30.0
"""Seconds in which a newer generation may come after that: the longest lease, fence and margin."""


def draw_times(order: random.Random) -> dict[str, str]:
    """Return time-outs with `lost_after` below or above the lease, each in half of the rounds."""
    lease = order.uniform(2.0, 8.0)
    lost_after = (
        order.uniform(1.0, lease) if order.random() < 0.5 else order.uniform(lease, 2 * lease)
    )
    return {
        "lease": f"{lease:.1f}s",
        "lost_after": f"{lost_after:.1f}s",
        "fence_after": f"{order.uniform(0.5, 8.0):.1f}s",
        "stop_grace": f"{order.uniform(0.5, 2.0):.1f}s",
    }


async def play(attempt: Attempt) -> None:
    """Run a job, do random harm for a while, and let what then still runs go on in peace."""
    order, world = attempt.random, attempt.world
    times = draw_times(order)
    attempt.note(", ".join(f"{name} {value}" for name, value in times.items()))
    hang = {"after": f"{order.uniform(2.0, 8.0):.1f}s", "first_step": "30s"}
    rank = ["--stubborn"] if order.random() < 0.3 else []
    job = await attempt.run(
        nodes=order.choice((2, 3)), rank=rank, policy=chaos_policy(times, hang=hang)
    )
    undo: list[Callable[[], None]] = []
    loop = asyncio.get_running_loop()
    until = loop.time() + HARM_S
    try:
        while loop.time() < until:
            await attempt.sleep(0.0, 4.0)
            # Most harm stays until the end; some of it passes.
            if undo and order.random() < 0.4:
                undo.pop(order.randrange(len(undo)))()
            else:
                undo += _do_harm(attempt, order.choice(job.hosts()))
        # Now nothing gets worse or better until there is a newer generation: then two may be alive.
        await attempt.await_newer(patience=LAUNCH_S)
    finally:
        for one in undo:
            one()
        world.network.clear()
    # What was stopped, paused or cut off is back beside the newer generation.
    await attempt.await_newer(patience=15.0, after=3.0)


def _do_harm(attempt: Attempt, victim: Host) -> list[Callable[[], None]]:
    """Do something to a host, or between it and others; return what undoes it."""
    assert attempt.job is not None
    order, network, job = attempt.random, attempt.world.network, attempt.job
    others = [*network.controllers, *(name for name in job.nodes() if name != victim.name)]
    what = order.choice(
        (
            "isolate",
            "controller",
            "peers",
            "pair",
            "pair",
            "loss",
            "delay",
            "stop",
            "stop",
            "pause",
            "kill",
        )
    )
    if what == "stop":
        kind = order.choice(("shim", "supervisor", "session", "sshd"))
        pids = victim.servers() if kind == "sshd" else victim.find(kind)
        if kind == "shim" and victim.name in attempt.world.woken:
            return []
        signal_all(pids, signal.SIGSTOP)
        attempt.note(f"{kind} of {victim.name} stopped")
        return [lambda: signal_all(pids, signal.SIGCONT)]
    if what == "pause":
        if victim.name in attempt.world.woken:
            return []
        attempt.world.pause(victim)
        attempt.note(f"{victim.name} paused")
        return [lambda: attempt.world.resume(victim)]
    if what == "kill":
        kind = order.choice(("rank", "shim", "supervisor", "session"))
        victim.signal_kind(kind, signal.SIGKILL)
        attempt.note(f"{kind} of {victim.name} killed")
        return []
    ends = {
        "isolate": ["*"],
        "controller": network.controllers,
        "peers": [name for name in others if name not in network.controllers],
        "pair": [order.choice(others)],
    }.get(what, ["*"])
    if what == "loss":
        rule = {"loss": order.uniform(0.2, 0.7)}
    elif what == "delay":
        rule = {"delay": order.uniform(0.2, 3.0)}
    else:
        rule = {"loss": 1.0}
    ways = order.choice(("both", "both", "in", "out"))
    for end in ends:
        if ways in ("both", "out"):
            network.set_link(victim.name, end, **rule)  # type: ignore[arg-type]
        if ways in ("both", "in"):
            network.set_link(end, victim.name, **rule)  # type: ignore[arg-type]
    attempt.note(f"{what} {ways} between {victim.name} and {', '.join(ends)}: {rule}")

    def heal() -> None:
        for end in ends:
            network.set_links(victim.name, end)
        attempt.note(f"{what} of {victim.name} is over")

    return [heal]
