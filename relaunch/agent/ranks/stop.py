"""Makes generations of a job go, and proves it: by the word of their keepers, else by group and by token.

Called with the job's lock held; decides nothing about which generations have to go.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import BinaryIO

from relaunch.agent import processes, tools
from relaunch.agent.loop import parse
from relaunch.agent.node import gpu_users
from relaunch.agent.protocol import Json, Order, Refused, line
from relaunch.agent.ranks import cgroup, find_shims
from relaunch.agent.state import Generation, JobState

SCAN_TIMEOUT = 2.0
"""Seconds to read the environment of every process: a busy machine with thousands takes a tenth."""
RESTORE_TIMEOUT = 3.0
"""Seconds for a keeper to make its files again: it is woken, and looks at once."""
ACKNOWLEDGED = 1.0
"""Seconds for a keeper to take an order: it never waits for anything longer than an fsync, or it is frozen."""
GOING = 2.0
"""Seconds past the grace for a keeper to kill, reap and say farewell."""


def stop_all(job: JobState, orders: list[Generation], below: Order, grace: float, stuck_after: float, reason: str) -> list[Order]:
    """Stop these generations, and every process of the job's tokens up to `below`; return those that were alive."""
    alive: set[Order] = set()
    unproven = []
    groups: dict[int, int] = {}
    for generation in _not_proven_gone(orders):
        recorded = await_records(generation)
        if generation.keeper_lives():
            confirmed = _ask_keeper(generation, grace, stuck_after, reason)
            if confirmed is None or not confirmed["already"]:
                alive.add(generation.order)
            if confirmed is not None:
                continue  # nothing that a rank forked can be outside of what its subreaper sees; the keeper ends by itself
            if not recorded:
                groups.update(_list_groups_below(generation))
            try:
                _end_keeper(generation)
            except Refused:  # it hangs in a write, say; what it keeps does not have to live as long
                _kill_what_is_left(job, [generation], groups, below, stuck_after)
                raise
        _end_supervisor(generation)
        if generation.started is not None or not recorded:
            unproven.append(generation)
    if unproven:
        alive.update(_kill_what_is_left(job, unproven, groups, below, stuck_after))
    return sorted(alive)


def find_living(job: JobState) -> list[Generation]:
    """Return what lives here of a job whose records were removed; nothing where they are whole.

    Keepers are found by the lock that they hold open, ranks by the token in their environment.
    """
    if job.is_recorded():
        return []
    orders = set(find_shims.find_keepers(job.state, job.path.name))
    if orders or job.generations():
        orders |= _find_ranks(job)
    else:
        # Most likely the first launch of a job. To read the environment of a process waits for that
        # process's memory: one that hangs in the kernel must not keep this node from every launch.
        answer = tools.bounded(lambda: {"orders": sorted(_find_ranks(job))}, SCAN_TIMEOUT)
        orders = {(submission, number) for submission, number in (answer or {"orders": []})["orders"]}
    return [job.generation(order) for order in sorted(orders)]


def _find_ranks(job: JobState) -> set[Order]:
    orders: set[Order] = set()

    def note(rest: str) -> bool:
        order = _order_of(rest)
        if order is not None:
            orders.add(order)
        return order is not None

    processes.of_token(f"{job.token_prefix}/", note, str(job.state), {})
    return orders


def await_records(generation: Generation) -> bool:
    """Have a living keeper make its files again where they were removed; return whether they are there."""
    if _is_whole(generation):
        return True
    deadline = time.monotonic() + RESTORE_TIMEOUT
    while time.monotonic() < deadline:
        keeper = generation.find_keeper()
        if keeper is None:
            break
        processes.kill(keeper, signal.SIGCONT)
        processes.kill(keeper, signal.SIGCHLD)
        time.sleep(0.02)
        if _is_whole(generation):
            break
    return generation.is_recorded()


def _is_whole(generation: Generation) -> bool:
    found = [(generation.path / name).exists() for name in ("orders", "../highest.json")]
    return all(found) and generation.is_recorded()


def _list_groups_below(generation: Generation) -> dict[int, int]:
    """Return pid and start time of all that a keeper without records has caused to be."""
    keeper = generation.find_keeper()
    below = processes.list_below(keeper) if keeper is not None else []
    return {process.pid: process.started for process in below}


def _identify_keeper(generation: Generation) -> tuple[int, int] | None:
    identity = generation.identity("keeper")
    keeper = generation.find_keeper() if identity is None else None
    return (keeper.pid, keeper.started) if keeper is not None else identity


def _not_proven_gone(generations: list[Generation]) -> list[Generation]:
    """Leave out those below one that was prepared: that it was is the proof that they went."""
    suspects: list[Generation] = []
    for generation in reversed(generations):
        suspects.append(generation)
        if generation.given is not None:
            break
    return suspects


def _ask_keeper(generation: Generation, grace: float, stuck_after: float, reason: str) -> Json | None:
    """Have the keeper stop its ranks; return its word that nothing of them is left, if it gives it.

    Raises:
        Refused: the keeper says what does not die. It lives on: without it nothing else may be able to find that.
    """
    for attempt in range(2):
        caller = generation.connect("orders", ACKNOWLEDGED)
        if caller is not None:
            with caller, caller.makefile("rb") as answers:
                try:
                    caller.sendall(line({"stop": {"stop_grace": grace, "reason": reason}}))
                    if answers.readline():
                        caller.settimeout(grace + GOING)
                        confirmed = parse(answers.readline())
                        if confirmed is not None and "stuck" in confirmed:
                            confirmed = _await_end(caller, answers, confirmed, stuck_after)
                        return {**confirmed, "already": confirmed["already"] and attempt == 0} if confirmed else None
                except OSError:  # silent or gone: the next look tells which
                    pass
        if not generation.keeper_lives():
            return None
        if attempt == 0:  # somebody may have frozen it: woken, it still stops its ranks with grace
            _signal(_identify_keeper(generation), signal.SIGCONT)
    return None


def _await_end(caller: socket.socket, answers: BinaryIO, said: Json, stuck_after: float) -> Json | None:
    """Wait for the keeper's word that nothing is left; `said` is what it has said meanwhile."""
    deadline = time.monotonic() + stuck_after
    answer: Json | None = said
    while answer is not None and "stuck" in answer:
        left = [pid for pid, started in answer["stuck"] if processes.lives(pid, started)]
        caller.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            answer = parse(answers.readline())
        except OSError:
            raise _stuck(left, stuck_after) from None
    return answer


def _stuck(pids: list[int], stuck_after: float) -> Refused:
    """Say what does not die, and why that is so."""
    foreign = [pid for pid in pids if not processes.can_signal(pid)]
    if foreign:
        text = (
            f"uid {os.geteuid()} cannot end what ranks have started as another user: "
            f"{gpu_users.describe(foreign)}; end it on this node, or reboot the node"
        )
    else:
        text = f"{stuck_after:g} s after SIGKILL there still is {gpu_users.describe(pids)}; this node needs a reboot"
    return Refused("stuck", text, pids=pids)


def _signal(identity: tuple[int, int] | None, number: int) -> bool:
    """Signal this very process, if it lives; return whether it does."""
    found = processes.look(identity[0]) if identity else None
    if identity is None or found is None or found.started != identity[1] or not found.lives:
        return False
    processes.kill(found, number)
    return True


def _end_keeper(generation: Generation) -> None:
    """Kill a keeper that did not go when asked. Its ranks die with it."""
    deadline = time.monotonic() + GOING
    while generation.keeper_lives():
        identity = _identify_keeper(generation)
        _signal(identity, signal.SIGKILL)
        if time.monotonic() > deadline:
            number = generation.order[1]
            raise Refused("stuck", f"the keeper of generation {number} does not die", pids=[identity[0]] if identity else [])
        time.sleep(0.005)


def _end_supervisor(generation: Generation) -> None:
    """The keeper's farewell is past: what lives now serves a dead generation."""
    deadline = time.monotonic() + GOING
    while _signal(generation.identity("supervisor"), signal.SIGKILL) and time.monotonic() < deadline:
        time.sleep(0.002)


def _order_of(rest: str) -> Order | None:
    submission, _, generation = rest.partition("/")
    return (int(submission), int(generation)) if submission.isdigit() and generation.isdigit() else None


def _kill_what_is_left(
    job: JobState, unproven: list[Generation], unrecorded: dict[int, int], below: Order, stuck_after: float
) -> set[Order]:
    """Kill until a whole look at /proc, and at the control groups of these generations, finds no process."""
    seen: set[Order] = set()
    groups = {**unrecorded, **{pid: started for generation in unproven for pid, started in generation.groups.items()}}
    cgroups = [(generation.order, folder) for generation in unproven if (folder := generation.cgroup) is not None]

    def wanted(rest: str) -> bool:
        order = _order_of(rest)
        if order is None or order > below:
            return False
        seen.add(order)
        return True

    deadline = time.monotonic() + stuck_after
    pause = 0.005
    killed: list[processes.Process] = []
    while True:
        left = processes.with_dying(processes.of_token(f"{job.token_prefix}/", wanted, str(job.state), groups), killed)
        for order, folder in cgroups:
            members = cgroup.members(folder)
            if members:
                seen.add(order)
                left += members
                cgroup.kill(folder)
        if not left:
            for _, folder in cgroups:
                cgroup.remove(folder)
            return seen
        for process in left:
            processes.kill(process, signal.SIGKILL)
        killed = left
        if time.monotonic() > deadline:
            raise _stuck(sorted({process.pid for process in left}), stuck_after)
        time.sleep(pause)
        pause = min(0.1, pause * 2)
