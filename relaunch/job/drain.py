"""Nodes that somebody wants of a job: when it leaves them, and what people may say to that. Why a node is wanted others say."""

from __future__ import annotations

from datetime import datetime

from relaunch.job.state import JobState, Leaving, Phase

NAMED = 4
"""Of the nodes that a job is to leave: what comes next is one line, also when a whole rack is drained."""


def left_out(job: JobState, now: datetime) -> tuple[str, ...]:
    """Nodes that a launch does not use: those that are wanted, where nobody has said no to it, or where the time for that is over."""
    return tuple(one.node for one in job.leaving if not one.denied or now >= one.until)


def at_checkpoint(job: JobState) -> tuple[Leaving, ...]:
    """What is left as soon as a checkpoint is finished."""
    return tuple(one for one in job.leaving if not one.denied) if job.phase is Phase.RUNNING else ()


def wanted(job: JobState, node: str) -> Leaving | None:
    return next((one for one in job.leaving if one.node == node), None)


def why(one: Leaving) -> str:
    return f"{one.by or 'a person'} wants {one.node}" + (f": {one.reason}" if one.reason else "")


def may_answer_leave(job: JobState, decision: str, node: str, now: datetime) -> str:
    """Why this is no answer to whoever wants the node, a clause; empty: it is one."""
    one = wanted(job, node)
    if one is None or job.ending is not None:
        return f"nobody wants {node} of {job.name}"
    if decision not in ("approve", "deny"):
        return f"{decision} says nothing about {node}: expected approve (it is left at once) or deny (not before {clock(one.until)})"
    if decision == "deny" and now >= one.until:
        return f"it had to leave {node} by {clock(one.until)}"
    return ""


def pending(job: JobState) -> tuple[str, ...]:
    """What is wanted of the job, until when, and what people may say to it."""
    return tuple(_told(job.name, one) for one in job.leaving) if not job.phase.is_final and job.ending is None else ()


def what_next(job: JobState) -> str:
    """`JobState.next` and what else will happen: a node that has to be left is left whatever comes next."""
    told = pending(job)
    more = (f"{len(told) - NAMED} more nodes are wanted",) if len(told) > NAMED else ()
    return "; ".join((job.next.what, *told[:NAMED], *more))


def _told(job: str, one: Leaving) -> str:
    wants = f"{one.by or 'a person'} wants {one.node} by {clock(one.until)}" + (f": {one.reason}" if one.reason else "")
    approve = f"`answer {job} approve --node {one.node}`: at once"
    if one.denied:
        return f"{wants}; {one.denied}; it leaves then ({approve})"
    return f"{wants}; it leaves at the next checkpoint ({approve}; `answer {job} deny --node {one.node}`: not before {one.until:%H:%M})"


def clock(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M} UTC"
