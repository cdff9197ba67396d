"""Record nodes that are slower than the others, and decide which of them is examined for that.

That a node is slow is what a program says or does: its ranks may have more data, or the longest
stage of a pipeline. So it costs a node nothing but an examination, where the policy asks for one,
and `replace` moves the job away from it without a word against it.
"""

from __future__ import annotations

from datetime import datetime

from relaunch.evidence.causes import Cause
from relaunch.evidence.stragglers import describe_slow_node
from relaunch.job.copies import replace
from relaunch.job.events import NodesSlow
from relaunch.job.state import Certainty, Diagnosis, JobState, Phase, SlowRecord

SLOW_NODE = "slow_node"
"""The fault code of a node that is examined because it is slow."""
MAX_OF_GENERATION = 16
"""Most slow nodes that are reported in one generation."""
KEPT = 2 * MAX_OF_GENERATION
MAX_EXAMINATIONS = 2
"""How often a job is stopped to examine a slow node. A node is examined for that once: each time
costs a restart, and a node that was found healthy stays as slow as it was."""


def list_slow(job: JobState) -> tuple[SlowRecord, ...]:
    """Return the slow nodes of the newest generation."""
    return tuple(one for one in job.slow_nodes if one.generation == job.generation)


def diagnose_slow_nodes(job: JobState, event: NodesSlow) -> Diagnosis | None:
    """Return the fault for which a slow node is examined; None: it is only reported."""
    examined = [one.slow.node for one in job.slow_nodes if one.examined]
    if (
        job.policy.stragglers.action not in ("examine", "replace")
        or job.phase is not Phase.RUNNING
        or job.incident is not None
        or len(examined) >= MAX_EXAMINATIONS
    ):
        return None
    used = {slot.node for slot in job.slots}
    slow = [one for one in event.slow if one.node in used and one.node not in examined]
    if not slow:
        return None
    return Diagnosis(
        Cause.NODE_FAULT,
        describe_slow_node(slow[0]),
        nodes=(slow[0].node,),
        code=SLOW_NODE,
        certainty=Certainty.GUESS,
        by_program=True,
    )


def record_slow_nodes(
    job: JobState, event: NodesSlow, diagnosis: Diagnosis | None, now: datetime
) -> tuple[JobState, tuple[str, ...]]:
    """Return the job with the nodes recorded, and a sentence for people about each."""
    places = {slot.node: place for place, slot in enumerate(job.slots)}
    known = {one.slow.node for one in list_slow(job)}
    left = MAX_OF_GENERATION - len(known)
    new = [one for one in event.slow if one.node in places and one.node not in known][:left]
    examined = diagnosis.nodes if diagnosis is not None else ()
    sentences: tuple[str, ...] = ()
    for slow in new:
        record = SlowRecord(now, job.generation, places[slow.node], slow, slow.node in examined)
        sentences = (*sentences, describe_slow_node(slow) + _explain_repeat(job, record))
        job = replace(job, slow_nodes=(*job.slow_nodes, record)[-KEPT:])
    return job, sentences


def _explain_repeat(job: JobState, record: SlowRecord) -> str:
    """Return a clause that says whether slowness followed the node or its ranks; empty: unknown."""
    for before in reversed(job.slow_nodes):
        if before.generation == record.generation:
            continue
        is_same_node, is_same_place = (
            before.slow.node == record.slow.node,
            before.place == record.place,
        )
        if is_same_node and not is_same_place:
            return (
                f"; it was slow in generation {before.generation} as well, with other ranks: "
                "that speaks against the node"
            )
        if is_same_place and not is_same_node:
            return (
                f"; {before.slow.node} was slow in generation {before.generation} with the same "
                "ranks: that speaks for a difference of work"
            )
    return ""
