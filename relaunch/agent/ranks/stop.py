"""Stop generations of a job, and prove that none of their processes is left.

The proof is the shim's confirmation; without it, a search by process group, control group and
token. Callers hold the job's lock. This module does not decide which generations to stop.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import BinaryIO

from relaunch.agent import processes, search
from relaunch.agent.loop import parse
from relaunch.agent.node import gpu_users
from relaunch.agent.protocol import Json, Order, Refusal, is_number, line
from relaunch.agent.ranks import cgroup, find_shims
from relaunch.agent.state import Generation, JobState

SEARCH_TIMEOUT = 3.0
"""Seconds for the environment of each process to become readable, where records were removed."""
RESTORE_TIMEOUT = 3.0
"""Timeout in seconds for a shim to restore its files. A signal makes it check at once."""
ACKNOWLEDGE_TIMEOUT = 1.0
"""Timeout in seconds for a shim to acknowledge an order. It never blocks longer than an fsync."""
SHIM_EXIT_TIMEOUT = 2.0
"""Seconds after the grace period for a shim to kill its ranks, reap them and confirm."""


def stop_all(
    job: JobState,
    orders: list[Generation],
    below: Order,
    grace: float,
    stuck_after: float,
    reason: str,
) -> list[Order]:
    """Stop these generations and every process with a token of the job up to `below`.

    Return the generations that were alive.

    Raises:
        Refusal: Something does not die within `stuck_after` seconds.
    """
    alive: set[Order] = set()
    unproven = []
    groups: dict[int, int] = {}
    for generation in _list_suspects(orders):
        recorded = await_records(generation)
        if generation.has_live_shim():
            confirmed = _ask_shim(generation, grace, stuck_after, reason)
            if confirmed is None or not confirmed["already"]:
                alive.add(generation.order)
            if confirmed is not None:
                # The shim is a subreaper and sees all that a rank forked. It exits by itself.
                continue
            if not recorded:
                groups.update(_list_groups_below(generation))
            try:
                _end_shim(generation)
            except Refusal:
                # The shim hangs, such as in a write: kill its ranks all the same. Or it is dead,
                # and its lock is held by what it has left: then nothing is stuck.
                _kill_rest(job, [generation], groups, below, stuck_after)
                if generation.has_live_shim():
                    raise
        _end_supervisor(generation)
        if generation.launch is not None or not recorded:
            unproven.append(generation)
    if unproven:
        alive.update(_kill_rest(job, unproven, groups, below, stuck_after))
        for generation in unproven:
            generation.remove_task_records()
    return sorted(alive)


def find_living(job: JobState) -> list[Generation]:
    """Return the living generations of a job whose records were removed.

    Return an empty list if the records are complete. Shims are found by the lock file that they
    hold open, ranks by the token in their environment.

    Raises:
        Refusal: The environment of some process, which may be of the job, cannot be read.
    """
    if job.is_recorded():
        return []
    orders = set(find_shims.find_shims(job.state, job.path.name))
    was_here = bool(orders or job.list_generations())
    since = _find_oldest_start(job)
    deadline = time.monotonic() + SEARCH_TIMEOUT
    while True:
        found = search.find_by_token(
            f"{job.token_prefix}/",
            lambda rest: _parse_order(rest) is not None,
            str(job.state),
            groups={},
            since=since,
        )
        orders.update(filter(None, map(_parse_order, found.tokens.values())))
        # Without a trace of the job, this is most likely its first launch: one process that hangs
        # is not to keep all jobs from this node.
        if not found.unread or not was_here:
            break
        if time.monotonic() > deadline:
            raise _make_unread_refusal({process.pid for process in found.unread})
        time.sleep(0.1)
    return [job.generation(order) for order in sorted(orders)]


def _find_oldest_start(job: JobState, order: Order | None = None) -> int:
    """Return when the oldest process of the job that may live was forked, in ticks since boot.

    What is older than a shim belongs to no rank of its generation, and those below were proven gone
    when that was prepared.

    Args:
        order: the lowest generation that may live; None: not known, as records were removed.
    """
    for generation in reversed(job.list_generations()):
        shim = generation.identity("shim")
        if shim is not None and (order is None or generation.order <= order):
            return shim[1]
    return 0


def await_records(generation: Generation) -> bool:
    """Have a living shim restore its removed files; return whether the generation is recorded."""
    if _is_complete(generation):
        return True
    deadline = time.monotonic() + RESTORE_TIMEOUT
    while time.monotonic() < deadline:
        shim = generation.find_shim()
        if shim is None:
            break
        processes.kill(shim, signal.SIGCONT)
        processes.kill(shim, signal.SIGCHLD)
        time.sleep(0.02)
        if _is_complete(generation):
            break
    return generation.is_recorded()


def _is_complete(generation: Generation) -> bool:
    present = [(generation.path / name).exists() for name in ("orders", "../highest.json")]
    return all(present) and generation.is_recorded()


def _list_groups_below(generation: Generation) -> dict[int, int]:
    """Return the start time, by pid, of all living descendants of a shim without records."""
    shim = generation.find_shim()
    below = processes.list_below(shim) if shim is not None else []
    return {process.pid: process.started for process in below}


def _identify_shim(generation: Generation) -> tuple[int, int] | None:
    identity = generation.identity("shim")
    shim = generation.find_shim() if identity is None else None
    return (shim.pid, shim.started) if shim is not None else identity


def _list_suspects(generations: list[Generation]) -> list[Generation]:
    """Return the generations that may be alive, newest first.

    Those below a prepared generation are left out: preparing it proved that they were gone.
    """
    suspects: list[Generation] = []
    for generation in reversed(generations):
        suspects.append(generation)
        if generation.prepared_order is not None:
            break
    return suspects


def _ask_shim(generation: Generation, grace: float, stuck_after: float, reason: str) -> Json | None:
    """Have the shim stop its ranks; return its confirmation that none is left, or None.

    Raises:
        Refusal: The shim reports processes that do not die. The shim is left alive, because it may
            be the only way to find them.
    """
    for attempt in range(2):
        caller = generation.connect("orders", ACKNOWLEDGE_TIMEOUT)
        if caller is not None:
            with caller, caller.makefile("rb") as answers:
                try:
                    caller.sendall(line({"stop": {"stop_grace": grace, "reason": reason}}))
                    if answers.readline():
                        caller.settimeout(grace + SHIM_EXIT_TIMEOUT)
                        confirmed = parse(answers.readline())
                        if confirmed is not None and "stuck" in confirmed:
                            confirmed = _await_end(caller, answers, confirmed, stuck_after)
                        return (
                            {**confirmed, "already": confirmed["already"] and attempt == 0}
                            if confirmed
                            else None
                        )
                except OSError:  # silent or gone: the check below finds out which
                    pass
        if not generation.has_live_shim():
            return None
        if attempt == 0:  # if it was stopped, SIGCONT lets it stop its ranks gracefully
            _signal(_identify_shim(generation), signal.SIGCONT)
    return None


def _await_end(
    caller: socket.socket, answers: BinaryIO, message: Json, stuck_after: float
) -> Json | None:
    """Wait for the shim's confirmation that nothing is left; `message` is its latest one.

    Raises:
        Refusal: Something is left after `stuck_after` seconds.
        OSError: Nothing that it named is left, but it does not confirm that.
    """
    deadline = time.monotonic() + stuck_after
    answer: Json | None = message
    while answer is not None and "stuck" in answer:
        named, unread = answer["stuck"], answer.get("unread", ())  # agents of 0.1.0 know no unread
        caller.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            answer = parse(answers.readline())
        except OSError:
            living = {pid for pid, started in named if processes.is_alive(pid, started)}
            if not living:
                raise
            raise _make_stuck_refusal(living.difference(unread), living, stuck_after) from None
    return answer


def _make_stuck_refusal(left: set[int], named: set[int], stuck_after: float) -> Refusal:
    """Return the refusal that names the processes that do not die, and the remedy.

    Args:
        left: What is left of the ranks. If it is empty, nothing that could be read is.
        named: These, and what cannot be read, by pid.
    """
    foreign = [pid for pid in sorted(left) if not processes.can_signal(pid)]
    groups = [
        pid for pid in sorted(left) if pid not in foreign and not processes.can_signal_group(pid)
    ]
    if not left:
        return _make_unread_refusal(named)
    if foreign or groups:
        names = [gpu_users.describe(foreign)] if foreign else []
        names += [f"process group {leader}" for leader in groups]
        text = (
            f"uid {os.geteuid()} cannot end what ranks have started as another user: "
            f"{', '.join(names)}; end it on this node, or reboot the node"
        )
    else:
        text = (
            f"{stuck_after:g} s after SIGKILL there still is {gpu_users.describe(sorted(left))}; "
            "this node needs a reboot"
        )
    return Refusal("stuck", text, pids=sorted(named))


def _make_unread_refusal(pids: set[int]) -> Refusal:
    text = (
        "whether something of the job is left is not known: the environment of "
        f"{gpu_users.describe(sorted(pids))} cannot be read, as of a process that hangs in the "
        "kernel; if it does not end, this node needs a reboot"
    )
    return Refusal("stuck", text, pids=sorted(pids))


def _signal(identity: tuple[int, int] | None, number: int) -> bool:
    """Signal the process with this (pid, start time) if it lives; return whether it does."""
    process = processes.read_process(identity[0]) if identity else None
    if (
        identity is None
        or process is None
        or process.started != identity[1]
        or not process.is_alive
    ):
        return False
    processes.kill(process, number)
    return True


def _end_shim(generation: Generation) -> None:
    """Kill a shim that did not exit when ordered to. Its ranks die with it.

    Raises:
        Refusal: The shim does not die.
    """
    deadline = time.monotonic() + SHIM_EXIT_TIMEOUT
    while generation.has_live_shim():
        identity = _identify_shim(generation)
        _signal(identity, signal.SIGKILL)
        if time.monotonic() > deadline:
            number = generation.order[1]
            raise Refusal(
                "stuck",
                f"the shim of generation {number} does not die",
                pids=[identity[0]] if identity else [],
            )
        time.sleep(0.005)


def _end_supervisor(generation: Generation) -> None:
    """Kill the supervisor of a generation whose shim is gone."""
    deadline = time.monotonic() + SHIM_EXIT_TIMEOUT
    while (
        _signal(generation.identity("supervisor"), signal.SIGKILL) and time.monotonic() < deadline
    ):
        time.sleep(0.002)


def _parse_order(rest: str) -> Order | None:
    submission, _, generation = rest.partition("/")
    return (
        (int(submission), int(generation))
        if is_number(submission) and is_number(generation)
        else None
    )


def _kill_rest(
    job: JobState,
    unproven: list[Generation],
    unrecorded: dict[int, int],
    below: Order,
    stuck_after: float,
) -> set[Order]:
    """Kill until a full scan of /proc and of the generations' control groups finds no process.

    Return the orders of the tokens and control groups that had processes.

    Raises:
        Refusal: Something is left after `stuck_after` seconds.
    """
    found_orders: set[Order] = set()
    since = _find_oldest_start(job, min(generation.order for generation in unproven))
    groups = {
        **unrecorded,
        **{pid: started for generation in unproven for pid, started in generation.groups.items()},
    }
    cgroups = [
        (generation.order, folder)
        for generation in unproven
        if (folder := generation.cgroup) is not None
    ]

    def is_covered(rest: str) -> bool:
        order = _parse_order(rest)
        return order is not None and order <= below

    deadline = time.monotonic() + stuck_after
    pause = 0.005
    killed: list[processes.Process] = []
    while True:
        found = search.find_by_token(
            f"{job.token_prefix}/", is_covered, str(job.state), groups, (os.getppid(),), since
        )
        found_orders.update(filter(None, map(_parse_order, found.tokens.values())))
        left = processes.add_dying(found.processes, killed)
        # These get no signal: nothing tells whether a pid has been reused.
        hidden = processes.find_hidden(groups, left)
        for order, folder in cgroups:
            members = cgroup.list_members(folder)
            if members:
                found_orders.add(order)
                left += members
            cgroup.kill(folder)
        if not left and not hidden and not found.unread:
            for _, folder in cgroups:
                cgroup.remove(folder)
            return found_orders
        for process in left:
            processes.kill(process, signal.SIGKILL)
        killed = left
        rest = deadline - time.monotonic()
        if rest <= 0:
            pids = {process.pid for process in (*left, *hidden)}
            named = pids.union(process.pid for process in found.unread)
            raise _make_stuck_refusal(pids, named, stuck_after)
        waits = found.unread and not left and not hidden
        pause = min(5.0 if waits else 0.1, pause * 2)
        time.sleep(min(pause, rest))
