"""Drain requests for a job's nodes: when the job leaves them, and which answers people may give.

The reason of a request is given by the requester.
"""

from __future__ import annotations

from datetime import datetime

from relaunch.job.state import JobState, Leaving, Phase
from relaunch.text import count_noun

NAMED = 4
"""Maximum number of nodes to leave that are named: the text is one line even for a whole rack."""


def left_out(job: JobState, now: datetime) -> tuple[str, ...]:
    """Return the nodes that a launch does not use because of drain requests.

    These are the requests that were not denied, or whose time to leave has come.
    """
    return tuple(one.node for one in job.leaving if not one.denied or now >= one.until)


def at_checkpoint(job: JobState) -> tuple[Leaving, ...]:
    """Return the drain requests that take effect as soon as a checkpoint is finished."""
    return tuple(one for one in job.leaving if not one.denied) if job.phase is Phase.RUNNING else ()


def wanted(job: JobState, node: str) -> Leaving | None:
    return next((one for one in job.leaving if one.node == node), None)


def why(one: Leaving) -> str:
    return f"{one.by or 'a person'} wants {one.node}" + (f": {one.reason}" if one.reason else "")


def may_answer_leave(job: JobState, decision: str, node: str, now: datetime) -> str:
    """Return a clause that says why this is no answer to a drain request; empty: it is one."""
    one = wanted(job, node)
    if one is None or job.ending is not None:
        return f"nobody wants {node} of {job.name}"
    if decision not in ("approve", "deny"):
        return f"{decision} says nothing about {node}: expected approve (it is left at once) or deny (not before {clock(one.until)})"
    if decision == "deny" and now >= one.until:
        return f"it had to leave {node} by {clock(one.until)}"
    return ""


def pending(job: JobState) -> tuple[str, ...]:
    """Return one clause per drain request: the node, the deadline, and the possible answers."""
    return (
        tuple(_told(job.name, one) for one in job.leaving)
        if not job.phase.is_final and job.ending is None
        else ()
    )


def what_next(job: JobState) -> str:
    """Return `JobState.next` and the open drain requests, which apply whatever comes next."""
    told = pending(job)
    more = (
        (f"{count_noun(len(told) - NAMED, 'more node is', 'more nodes are')} wanted",)
        if len(told) > NAMED
        else ()
    )
    return "; ".join((job.next.what, *told[:NAMED], *more))


def _told(job: str, one: Leaving) -> str:
    wants = f"{one.by or 'a person'} wants {one.node} by {clock(one.until)}" + (
        f": {one.reason}" if one.reason else ""
    )
    approve = f"`answer {job} approve --node {one.node}`: at once"
    if one.denied:
        return f"{wants}; {one.denied}; it leaves then ({approve})"
    return f"{wants}; it leaves at the next checkpoint ({approve}; `answer {job} deny --node {one.node}`: not before {one.until:%H:%M})"


def clock(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M} UTC"
