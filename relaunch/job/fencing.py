"""Compute when a node that is cut off must have stopped its own ranks: its silence is then proof.

The protocol is docs/reference/agent-protocol.md, "Lease and fence"; tests/model explores it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from relaunch.generation import LaunchedGeneration
from relaunch.job.copies import replace
from relaunch.job.state import JobState
from relaunch.spec.policy import Timeouts

MOST_PEERS = 16
"""Maximum number of supervisors that one asks; in larger gangs a stop spreads over several hops."""
FENCE_MARGIN = timedelta(seconds=5)
"""Allowance for a shim that is scheduled late, a slow SIGKILL, and different clock rates."""


def will_fence(job: JobState, nodes: int) -> bool:
    """Return whether ranks launched now on so many nodes stop themselves when they are cut off."""
    return job.policy.strict_lease or (job.spec.gang == "lockstep" and nodes > 1)


def plan_generation(job: JobState, generation: int, nodes: tuple[str, ...]) -> LaunchedGeneration:
    """Return the record of a launch under the job's present policy."""
    times = job.policy.timeouts
    return LaunchedGeneration(
        submission=job.submission,
        generation=generation,
        nodes=nodes,
        size=len(nodes),
        fences=will_fence(job, len(nodes)),
        lease=times.lease,
        fence_after=times.fence_after,
        stop_grace=times.stop_grace,
        valid_for=times.valid_for,
    )


def unknown_generation(nodes: tuple[str, ...]) -> LaunchedGeneration:
    """Return the record of ranks with unknown timeouts: silence never proves them stopped."""
    zero = timedelta(0)
    return LaunchedGeneration(0, 0, nodes, len(nodes), False, zero, zero, zero, zero)


def living_generations(job: JobState) -> tuple[LaunchedGeneration, ...]:
    """Return the launches whose ranks may be alive.

    For a state without any (written by a version that kept none, or before the first launch), the
    result is derived from its policy.
    """
    if job.launched or not (job.maybe_alive or job.slots):
        return job.launched
    nodes = job.maybe_alive or tuple(slot.node for slot in job.slots)
    judged = plan_generation(job, job.generation, nodes)
    size = max(len(nodes), job.spec.node_count)
    return (replace(judged, size=size, complete=job.launched_at is not None),)


def running_timeouts(job: JobState) -> Timeouts:
    """Return the timeouts of the running ranks: lease and fence times are those of their launch.

    A later policy change affects only how they are watched. Heartbeats renew the lease, so at least
    three of them have to fit into one lease.
    """
    times = job.policy.timeouts
    own = job.submission, job.generation
    launch = next((o for o in job.launched if (o.submission, o.generation) == own), None)
    if launch is None:
        return times
    return times.model_copy(
        update={
            "lease": launch.lease,
            "fence_after": launch.fence_after,
            "stop_grace": launch.stop_grace,
            "heartbeat": min(times.heartbeat, launch.lease / 3),
        }
    )


def fences(job: JobState) -> bool:
    """Return whether all ranks that may be alive stop themselves when they are cut off.

    Before the first launch: whether the ranks of the next launch will.
    """
    if job.launched:
        return all(one.fences for one in job.launched)
    return will_fence(job, job.gang_size)


def may_leave_lost_behind(job: JobState) -> bool:
    """Return whether ranks may be launched without the lost nodes, once those must have fenced.

    Not when every node of a gang is lost: they may still reach each other and rightly continue, and
    no node is left that could be proven stopped.
    """
    lost = set(job.lost_names)
    gangs = [set(one.nodes) for one in living_generations(job)]
    return fences(job) and bool(gangs) and all(gang - lost for gang in gangs)


def peers_of(group_rank: int, nodes: int) -> tuple[int, ...]:
    """Return the group ranks that a node asks: all others, or 16 of them.

    The 16 are chosen so that every node is reached within `hops` requests: with more than 17 nodes,
    node i asks 16·i … 16·i + 15 (mod n), a de Bruijn graph, whose diameter is ⌈log₁₆ n⌉.
    """
    if nodes - 1 <= MOST_PEERS:
        return tuple(other for other in range(nodes) if other != group_rank)
    asked = {(MOST_PEERS * group_rank + offset) % nodes for offset in range(MOST_PEERS)}
    return tuple(sorted(asked - {group_rank}))


def hops(nodes: int) -> int:
    """Return how many times `fence_after` a stop may need to reach the last node."""
    count, reach = 1, MOST_PEERS + 1 if nodes <= MOST_PEERS + 1 else MOST_PEERS
    while reach < nodes:
        count, reach = count + 1, reach * MOST_PEERS
    return count


def fence_wait(times: Timeouts | LaunchedGeneration, nodes: int) -> timedelta:
    """Return how long after the last proof of life the ranks of a lost node are gone.

    A proof of life is a lease that ran, or a peer that was not stopped yet.
    """
    return hops(nodes) * times.fence_after + times.stop_grace + FENCE_MARGIN


def safe_launch_at(
    generations: Iterable[LaunchedGeneration],
    since: float,
    stopped_at: Mapping[str, float],
    last_heard: Mapping[str, float],
) -> float | None:
    """Return when no rank of these generations can be alive, on whatever node.

    One node with a valid lease is enough to keep a silent node's ranks alive, and any node of its
    gang may be that one until it is stopped or its own lease has expired. So the wait starts at the
    last of these moments, not at the first. The rule: docs/reference/agent-protocol.md, "Lease and
    fence".

    Args:
        generations: The launches whose ranks may be alive.
        since: A moment from which on no watch renews leases of these generations.
        stopped_at: By node, when all of these generations on it were proven stopped.
        last_heard: By node known to be lost before `since`, the latest moment at which its lease
            may have been renewed; later than `since` where an order may still start ranks. For
            other nodes `since` is used.

    All times are seconds of one monotonic clock.

    Returns:
        None where no wait is long enough: a generation does not fence, or none of its nodes is
        proven stopped, so that its nodes may see each other and rightly go on.
    """
    safe_at = since
    for one in generations:
        unproven = [n for n in one.nodes if n not in stopped_at and n not in one.stopped]
        if not unproven:
            continue
        if not one.fences or len(unproven) == len(one.nodes):
            return None
        heard = [last_heard.get(n, since) for n in unproven]
        if not one.complete:
            # An order in flight may start ranks, whose first lease runs from then on. An earlier
            # silence of the node proves nothing about them.
            heard = [max(moment, since + one.valid_for.total_seconds()) for moment in heard]
        leased = [moment + one.lease.total_seconds() for moment in heard]
        stopped = [stopped_at[n] for n in one.nodes if n in stopped_at]
        last = max(since, *leased, *stopped)
        safe_at = max(safe_at, last + fence_wait(one, one.size).total_seconds())
    return safe_at


def safe_after(job: JobState, stopped_at: datetime) -> datetime | None:
    """Return when a launch without the lost nodes is safe, if all others stop at `stopped_at`.

    For display only: the wait itself is measured by a clock that is never stepped.
    None: no wait is long enough.
    """
    if not may_leave_lost_behind(job):
        return None
    heard = {lost.node: (lost.last_heard_at - stopped_at).total_seconds() for lost in job.lost}
    living = living_generations(job)
    stopped = {node: 0.0 for one in living for node in one.nodes if node not in heard}
    safe_at = safe_launch_at(living, 0.0, stopped, heard)
    return None if safe_at is None else stopped_at + timedelta(seconds=safe_at)
