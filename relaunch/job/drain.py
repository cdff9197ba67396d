"""Drain requests for a job's nodes: when the job leaves them, and which answers people may give.

The reason of a request is given by the requester.
"""

from __future__ import annotations

from datetime import datetime

from relaunch.job.state import JobState, NodeDrain, Phase
from relaunch.text import format_time


def nodes_to_drain(job: JobState, now: datetime) -> tuple[str, ...]:
    """Return the nodes that a launch does not use because of drain requests.

    These are the requests that were not denied, or whose time to leave has come.
    """
    return tuple(one.node for one in job.drains if not one.denied or now >= one.until)


def drains_at_checkpoint(job: JobState) -> tuple[NodeDrain, ...]:
    """Return the drain requests that take effect as soon as a checkpoint is finished."""
    return tuple(one for one in job.drains if not one.denied) if job.phase is Phase.RUNNING else ()


def find_drain(job: JobState, node: str) -> NodeDrain | None:
    """Return the drain request for a node, or None."""
    return next((one for one in job.drains if one.node == node), None)


def explain_drain(one: NodeDrain) -> str:
    return f"{one.by or 'a person'} wants {one.node}" + (f": {one.reason}" if one.reason else "")


def check_drain_answer(job: JobState, decision: str, node: str, now: datetime) -> str:
    """Return a clause that says why this is no answer to a drain request; empty: it is one."""
    one = find_drain(job, node)
    if one is None or job.ending is not None:
        return f"there is no request to drain {node} of {job.name}"
    if decision not in ("approve", "deny"):
        denied = f"deny (not before {format_time(one.until)})"
        expected = f"approve (it is left at once) or {denied}"
        return f"{decision} says nothing about {node}: expected {expected}"
    if decision == "deny" and now >= one.until:
        return f"it had to leave {node} by {format_time(one.until)}"
    return ""


def describe_drains(job: JobState) -> tuple[str, ...]:
    """Return one clause per drain request: the node, the deadline, and the possible answers."""
    return (
        tuple(_describe_drain(job.name, one) for one in job.drains)
        if not job.phase.is_final and job.ending is None
        else ()
    )


def _describe_drain(job: str, one: NodeDrain) -> str:
    wants = f"{one.by or 'a person'} wants {one.node} by {format_time(one.until)}" + (
        f": {one.reason}" if one.reason else ""
    )
    approve = f"`answer {job} approve --node {one.node}`: at once"
    if one.denied:
        return f"{wants}; {one.denied}; it leaves then ({approve})"
    deny = f"`answer {job} deny --node {one.node}`: not before {one.until:%H:%M}"
    return f"{wants}; it leaves at the next checkpoint ({approve}; {deny})"
