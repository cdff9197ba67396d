"""Stop ranks, and go on until they are proven stopped: nothing is launched, and no job ends, before
that."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from functools import partial

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from relaunch.job.events import Event, RanksStopped
    from relaunch.workflows.training_job import commands
    from relaunch.workflows.training_job.session import STOP_PAUSABLE_AFTER, Session


async def prove_stopped(
    session: Session, generation: int, nodes: tuple[str, ...], summary: str, *, once: bool = False
) -> RanksStopped:
    """Stop a generation and all earlier ones on some nodes. With `once`, after one try.

    Proof may take for ever, where a node cannot be reached or a process cannot be killed. People
    then hear of it (`StopUnproven`), and the node is asked on: its ranks end, or it is rebooted or
    declared dead.
    """
    while True:
        stop = commands.stop_ranks(session.job, generation, nodes, summary, once=once)
        # After the first notice it is ordered again rarely: the next run goes on with that.
        after = timedelta(0) if session.job.unstopped else STOP_PAUSABLE_AFTER
        outcome = await session.tasks.wait(stop, pausable_after=after)
        if isinstance(outcome, RanksStopped):
            return outcome
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise asyncio.CancelledError  # it came with the outcome
        session.post(outcome)
        await workflow.wait_condition(partial(_is_taken, session, outcome))
        nodes = tuple(node for node in nodes if node in session.job.maybe_alive)
        if not nodes:  # all others were declared dead
            return RanksStopped(session.job.generation, (), workflow.now())


def _is_taken(session: Session, event: Event) -> bool:
    return event not in session.inbox
