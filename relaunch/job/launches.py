"""How the record of launched generations changes: reserved, complete, found, proven stopped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from relaunch.generation import LaunchedGeneration
from relaunch.job.fencing import plan_generation, unknown_generation
from relaunch.job.state import JobState


def reserve_launch(job: JobState, launch: LaunchedGeneration) -> JobState:
    """Record a launch that is ordered now: from here on its ranks may exist."""
    return replace(job, launched=(*_fold(job.launched), launch))


def settle_failed_launch(job: JobState, generation: int, *, started: bool) -> JobState:
    """Record what a launch that did not come to its end has left behind.

    Args:
        job: As the launch was ordered.
        generation: Which launch.
        started: Whether an order to start was sent to some node. If not, no rank of it exists.
    """
    if started and _reserved(job, generation) is None:
        nodes = tuple(slot.node for slot in job.slots)
        job = reserve_launch(job, plan_generation(job, generation, nodes))
    return _settle(job, generation, started=started)


def settle_given_up_launch(job: JobState, generation: int, *, started: bool) -> JobState:
    """Record what a launch has left behind whose end came when the job did something else already."""
    launch = _reserved(job, generation)
    if launch is None or launch.complete or set(launch.nodes) - set(launch.stopped) <= set(job.maybe_alive):
        return job  # it is known by now where its ranks may be
    return _settle(job, generation, started=started)


def _settle(job: JobState, generation: int, *, started: bool) -> JobState:
    launch = _reserved(job, generation)
    if launch is None:
        return job
    if not started:
        return replace(job, launched=tuple(one for one in job.launched if one is not launch))
    return replace(job, maybe_alive=tuple(dict.fromkeys((*job.maybe_alive, *launch.nodes))))


def complete_launch(job: JobState, generation: int) -> JobState:
    """Record that ranks run on every node of a launch. The older ones were stopped for it."""
    nodes = tuple(slot.node for slot in job.slots)
    launch = _reserved(job, generation) or plan_generation(job, generation, nodes)
    return replace(job, maybe_alive=nodes, launched=(replace(launch, complete=True),))


def add_found(job: JobState, nodes: tuple[str, ...], launched: tuple[LaunchedGeneration, ...]) -> JobState:
    """Record where ranks may live that this job knew nothing of, and what is known of them.

    Where no launch is known for a node, silence never proves its ranks gone.
    """
    alive = tuple(dict.fromkeys((*job.maybe_alive, *nodes)))
    known = {_key(one) for one in job.launched}
    # Of an earlier submission: what it does not hold any more was proven stopped.
    found = (replace(one, stopped=tuple(node for node in one.nodes if node not in alive)) for one in launched if _key(one) not in known)
    every = (*_living(found), *job.launched)
    covered = {node for one in every for node in one.nodes if node not in one.stopped}
    if strange := tuple(node for node in nodes if node not in covered):
        every = (unknown_generation(strange), *every)
    return replace(job, maybe_alive=alive, launched=every)


def prove_stopped(job: JobState, nodes: Iterable[str]) -> JobState:
    """Record nodes on which every generation is proven stopped, or must have fenced by now."""
    gone = frozenset(nodes)
    marked = (replace(one, stopped=tuple(node for node in one.nodes if node in gone or node in one.stopped)) for one in job.launched)
    return replace(
        job,
        maybe_alive=tuple(node for node in job.maybe_alive if node not in gone),
        lost=tuple(lost for lost in job.lost if lost.node not in gone),
        launched=_living(marked),
    )


def forget_node(job: JobState, node: str) -> JobState:
    """Take a person's word that a node is dead. It counts as no proof for what it might have seen."""
    launched = (replace(one, nodes=tuple(other for other in one.nodes if other != node)) for one in job.launched)
    return replace(
        job,
        maybe_alive=tuple(other for other in job.maybe_alive if other != node),
        lost=tuple(lost for lost in job.lost if lost.node != node),
        launched=_living(launched),
    )


def _reserved(job: JobState, generation: int) -> LaunchedGeneration | None:
    own = job.submission, generation
    return next((one for one in job.launched if _key(one) == own), None)


def _key(launch: LaunchedGeneration) -> tuple[int, int]:
    return launch.submission, launch.generation


def _living(launched: Iterable[LaunchedGeneration]) -> tuple[LaunchedGeneration, ...]:
    return tuple(one for one in launched if set(one.nodes) - set(one.stopped))


def _fold(launched: tuple[LaunchedGeneration, ...]) -> tuple[LaunchedGeneration, ...]:
    """Keep one record of neighbours that differ by their number only: attempts may be many."""
    folded: list[LaunchedGeneration] = []
    for one in launched:
        if folded and replace(folded[-1], generation=one.generation) == one:
            folded.pop()
        folded.append(one)
    return tuple(folded)
