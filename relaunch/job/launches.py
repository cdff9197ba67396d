"""Update the record of launched generations: reserved, complete, found, proven stopped."""

from __future__ import annotations

from collections.abc import Iterable

from relaunch.generation import LaunchedGeneration
from relaunch.job.copies import replace
from relaunch.job.fencing import plan_generation, unknown_generation
from relaunch.job.generation_nodes import record_nodes
from relaunch.job.state import JobState


def reserve_launch(job: JobState, launch: LaunchedGeneration) -> JobState:
    """Record a launch that is ordered now: from then on its ranks may exist."""
    nodes = record_nodes(job.generation_nodes, launch.generation, launch.nodes)
    return replace(job, launched=(*_fold(job.launched), launch), generation_nodes=nodes)


def settle_failed_launch(job: JobState, generation: int, *, started: bool) -> JobState:
    """Record what a launch that did not complete has left behind.

    Args:
        job: The state in which the launch was ordered.
        generation: The generation of the launch.
        started: Whether a start order was sent to some node. If not, no rank of it exists.
    """
    if started and _find_launch(job, generation) is None:
        nodes = tuple(slot.node for slot in job.slots)
        job = reserve_launch(job, plan_generation(job, generation, nodes))
    return _settle(job, generation, started=started)


def settle_given_up_launch(job: JobState, generation: int, *, started: bool) -> JobState:
    """Record what a launch has left behind that ended after the job had given it up."""
    launch = _find_launch(job, generation)
    if (
        launch is None
        or launch.complete
        or set(launch.nodes) - set(launch.stopped) <= set(job.maybe_alive)
    ):
        return job  # every node where its ranks may be is already recorded
    return _settle(job, generation, started=started)


def _settle(job: JobState, generation: int, *, started: bool) -> JobState:
    launch = _find_launch(job, generation)
    if launch is None:
        return job
    if not started:
        return replace(job, launched=tuple(one for one in job.launched if one is not launch))
    return replace(job, maybe_alive=tuple(dict.fromkeys((*job.maybe_alive, *launch.nodes))))


def complete_launch(job: JobState, generation: int) -> JobState:
    """Record that ranks run on every node of a launch. All older ranks were stopped before it."""
    nodes = tuple(slot.node for slot in job.slots)
    launch = _find_launch(job, generation) or plan_generation(job, generation, nodes)
    return replace(job, maybe_alive=nodes, launched=(replace(launch, complete=True),))


def add_found(
    job: JobState, nodes: tuple[str, ...], launched: tuple[LaunchedGeneration, ...]
) -> JobState:
    """Record nodes on which ranks unknown to this job may be alive, with their known launches.

    Where no launch is known for a node, silence never proves its ranks stopped.
    """
    alive = tuple(dict.fromkeys((*job.maybe_alive, *nodes)))
    known = {_key(one) for one in job.launched}
    # Launches of an earlier submission: on the nodes that it no longer holds, its ranks were
    # proven stopped.
    found = (
        replace(one, stopped=tuple(node for node in one.nodes if node not in alive))
        for one in launched
        if _key(one) not in known
    )
    every = (*_living(found), *job.launched)
    covered = {node for one in every for node in one.nodes if node not in one.stopped}
    if strange := tuple(node for node in nodes if node not in covered):
        every = (unknown_generation(strange), *every)
    return replace(job, maybe_alive=alive, launched=every)


def prove_stopped(job: JobState, nodes: Iterable[str]) -> JobState:
    """Record nodes on which every generation is proven stopped, or must have fenced by now."""
    proven = frozenset(nodes)
    marked = (
        replace(
            one, stopped=tuple(node for node in one.nodes if node in proven or node in one.stopped)
        )
        for one in job.launched
    )
    return replace(
        job,
        maybe_alive=tuple(node for node in job.maybe_alive if node not in proven),
        lost=tuple(lost for lost in job.lost if lost.node not in proven),
        launched=_living(marked),
    )


def forget_stopped(job: JobState) -> JobState:
    """Remove the nodes on which no rank may be alive any more from those that could not be proven
    stopped."""
    unstopped = tuple(one for one in job.unstopped if one.node in job.maybe_alive)
    return job if unstopped == job.unstopped else replace(job, unstopped=unstopped)


def forget_node(job: JobState, node: str) -> JobState:
    """Remove a node that a person declared dead from the record.

    The node is removed from its launches instead of being marked as stopped: the declaration is
    not the proof of a stopped node that `safe_launch_at` requires before it waits for the others.
    """
    launched = (
        replace(one, nodes=tuple(other for other in one.nodes if other != node))
        for one in job.launched
    )
    return replace(
        job,
        maybe_alive=tuple(other for other in job.maybe_alive if other != node),
        lost=tuple(lost for lost in job.lost if lost.node != node),
        launched=_living(launched),
    )


def _find_launch(job: JobState, generation: int) -> LaunchedGeneration | None:
    own = job.submission, generation
    return next((one for one in job.launched if _key(one) == own), None)


def _key(launch: LaunchedGeneration) -> tuple[int, int]:
    return launch.submission, launch.generation


def _living(launched: Iterable[LaunchedGeneration]) -> tuple[LaunchedGeneration, ...]:
    return tuple(one for one in launched if set(one.nodes) - set(one.stopped))


def _fold(launched: tuple[LaunchedGeneration, ...]) -> tuple[LaunchedGeneration, ...]:
    """Keep one record of adjacent launches that differ only by generation: they may be many."""
    folded: list[LaunchedGeneration] = []
    for one in launched:
        if folded and replace(folded[-1], generation=one.generation) == one:
            folded.pop()
        folded.append(one)
    return tuple(folded)
