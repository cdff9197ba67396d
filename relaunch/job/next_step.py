"""Describe what happens next to a job, and what a person can do about it, in one line."""

from __future__ import annotations

from relaunch.job.drain import describe_drains
from relaunch.job.state import JobState, Phase
from relaunch.text import count_noun, join_names

NAMED = 4
"""Maximum number of nodes that are named: the text is one line even for a whole rack."""
MOST_REASONS = 2


def describe_next(job: JobState) -> str:
    """Return `JobState.next`, what it waits for before, and the open drain requests, which apply
    whatever comes next."""
    drains = describe_drains(job)
    more = (
        (f"{count_noun(len(drains) - NAMED, 'more node is', 'more nodes are')} wanted",)
        if len(drains) > NAMED
        else ()
    )
    return "; ".join((*_describe_unstopped(job), job.next.what, *drains[:NAMED], *more))


def explain_unstopped(job: JobState) -> str:
    """Return a clause that says why ranks could not be proven stopped, and on which nodes."""
    explained = [one for one in job.unstopped if one.reason]
    reasons = [f"{one.node}: {one.reason}" for one in explained[:MOST_REASONS]]
    nodes = join_names((one.node for one in job.unstopped), NAMED)
    why = f" ({'; '.join(reasons)})" if reasons else ""
    return f"ranks on {nodes} are not proven stopped{why}"


def _describe_unstopped(job: JobState) -> tuple[str, ...]:
    if not job.unstopped or job.phase.is_final:
        return ()
    if job.phase is Phase.WAITING_FOR_PERSON:
        return (explain_unstopped(job),)
    return (
        f"{explain_unstopped(job)}, and nothing is launched before: end what hangs there, or "
        "reboot it; if you know that it is off: `nodes declare-dead`",
        "then it goes on by itself",
    )
