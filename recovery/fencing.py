"""When silence is proof: how a cut-off node comes to stop its own ranks, and when that must have happened.

The protocol is docs/reference/agent-protocol.md, "Lease and fence"; tests/model explores it.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from recovery.model import JobState
from recovery.policy import Timeouts

MOST_PEERS = 16
"""Supervisors that one supervisor asks; in larger gangs a stop travels through them."""
FENCE_MARGIN = timedelta(seconds=5)
"""For a keeper that is scheduled late, SIGKILL that takes its time, and clocks that run at slightly different rates."""


def fences(job: JobState) -> bool:
    """Whether ranks of this job stop themselves when they are cut off from everybody."""
    return job.policy.strict_lease or (job.spec.gang == "lockstep" and job.gang_size > 1)


def may_leave_lost_behind(job: JobState) -> bool:
    """Whether ranks may be launched without the lost nodes, once those must have fenced themselves.

    Not when every node is lost: they may see each other and rightly go on, and nobody is there who could be proven stopped.
    """
    return fences(job) and not set(job.lost_names) >= {slot.node for slot in job.slots}


def peers_of(group_rank: int, nodes: int) -> tuple[int, ...]:
    """Return the group ranks that a node asks: all others, or 16 of them, chosen so that every node is at most `hops` questions away.

    With more than 17 nodes, node i asks 16·i … 16·i + 15 (mod n): a de Bruijn graph, whose diameter is ⌈log₁₆ n⌉.
    """
    if nodes - 1 <= MOST_PEERS:
        return tuple(other for other in range(nodes) if other != group_rank)
    asked = {(MOST_PEERS * group_rank + offset) % nodes for offset in range(MOST_PEERS)}
    return tuple(sorted(asked - {group_rank}))


def hops(nodes: int) -> int:
    """How many times `fence_after` a stop may need to reach the last node."""
    count, reach = 1, MOST_PEERS + 1 if nodes <= MOST_PEERS + 1 else MOST_PEERS
    while reach < nodes:
        count, reach = count + 1, reach * MOST_PEERS
    return count


def fence_wait(timeouts: Timeouts, nodes: int) -> timedelta:
    """How long after the last proof of life (a lease that ran, a peer that was not stopped) the ranks of a lost node are gone."""
    return hops(nodes) * timeouts.fence_after + timeouts.stop_grace + FENCE_MARGIN


def safe_after(job: JobState, stopped_at: datetime) -> datetime | None:
    """When the lost nodes must have stopped their own ranks, if another node of the gang is proven stopped at `stopped_at`.

    None: nothing bounds it.
    """
    if not may_leave_lost_behind(job):
        return None
    leased = max((lost.last_heard_at + job.policy.timeouts.lease for lost in job.lost), default=stopped_at)
    return max(stopped_at, leased) + fence_wait(job.policy.timeouts, job.spec.node_count)
