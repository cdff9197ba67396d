"""Makes generations of a job go, and proves it: by the word of their keepers, else by group and by token.

Called with the job's lock held; decides nothing about which generations have to go.
"""

from __future__ import annotations

import signal
import time

from agent import processes
from agent.loop import parse
from agent.protocol import Json, Order, Refused, line
from agent.state import Generation, JobState

ACKNOWLEDGED = 1.0
"""Seconds for a keeper to take an order: it never waits for anything longer than an fsync, or it is frozen."""
GOING = 2.0
"""Seconds past the grace for a keeper to kill, reap and say farewell."""


def stop_all(job: JobState, orders: list[Generation], below: Order, grace: float, stuck_after: float, because: str) -> list[Order]:
    """Stop these generations, and every process of the job's tokens up to `below`; return those that were alive."""
    alive: set[Order] = set()
    unproven = []
    for generation in _not_proven_gone(orders):
        if generation.keeper_lives():
            confirmed = _ask_keeper(generation, grace, because)
            if confirmed is None or not confirmed["already"]:
                alive.add(generation.order)
            if confirmed is not None:
                continue  # nothing that a rank forked can be outside of what its subreaper sees; the keeper ends by itself
            _end_keeper(generation)
        _end_supervisor(generation)
        if generation.started is not None:
            unproven.append(generation)
    if unproven:
        groups = {pid: started for generation in unproven for pid, started in generation.groups.items()}
        alive.update(_kill_what_is_left(job, groups, below, stuck_after))
    return sorted(alive)


def _not_proven_gone(generations: list[Generation]) -> list[Generation]:
    """Leave out those below one that was prepared: that it was is the proof that they went."""
    suspects: list[Generation] = []
    for generation in reversed(generations):
        suspects.append(generation)
        if generation.given is not None:
            break
    return suspects


def _ask_keeper(generation: Generation, grace: float, because: str) -> Json | None:
    """Have the keeper stop its ranks; return its word that nothing of them is left, if it gives it."""
    for attempt in range(2):
        caller = generation.connect("orders", ACKNOWLEDGED)
        if caller is not None:
            with caller, caller.makefile("rb") as answers:
                try:
                    caller.sendall(line({"stop": {"stop_grace": grace, "because": because}}))
                    if answers.readline():
                        caller.settimeout(grace + GOING)
                        confirmed = parse(answers.readline())
                        return {**confirmed, "already": confirmed["already"] and attempt == 0} if confirmed else None
                except OSError:  # silent or gone: the next look tells which
                    pass
        if not generation.keeper_lives():
            return None
        if attempt == 0:  # somebody may have frozen it: woken, it still stops its ranks with grace
            _signal(generation.identity("keeper"), signal.SIGCONT)
    return None


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
        identity = generation.identity("keeper")
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


def _kill_what_is_left(job: JobState, groups: dict[int, int], below: Order, stuck_after: float) -> set[Order]:
    """Kill until a whole look at /proc finds nobody."""
    seen: set[Order] = set()

    def wanted(rest: str) -> bool:
        order = _order_of(rest)
        if order is None or order > below:
            return False
        seen.add(order)
        return True

    deadline = time.monotonic() + stuck_after
    pause = 0.005
    while True:
        left = processes.of_token(f"{job.token_prefix}/", wanted, str(job.state), groups)
        if not left:
            return seen
        for process in left:
            processes.kill(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            pids = sorted(process.pid for process in left)
            raise Refused(
                "stuck",
                f"processes {pids} are alive {stuck_after:g} s after SIGKILL; this node needs a reboot",
                pids=pids,
            )
        time.sleep(pause)
        pause = min(0.1, pause * 2)
