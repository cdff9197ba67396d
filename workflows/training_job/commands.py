"""Orders of a job: one function per activity, with its timeouts, its retry policy and its summary
in the web UI."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    ChildWorkflowError,
    WorkflowAlreadyStartedError,
    is_cancelled_exception,
)
from temporalio.workflow import (
    ActivityCancellationType,
    ChildWorkflowCancellationType,
    ParentClosePolicy,
)

with workflow.unsafe.imports_passed_through():
    from pydantic import TypeAdapter, ValidationError

    from relaunch.activities.examine import NodeActivities
    from relaunch.activities.launch import (
        JobActivities,
        LaunchRanksInput,
        LaunchRanksOutput,
        PreparedNode,
        find_last_step,
        make_gang,
    )
    from relaunch.activities.links import CheckLinksInput, LinkActivities
    from relaunch.activities.records import ArchiveIncidentsInput, RecordActivities
    from relaunch.activities.repairs import FollowRepairInput, RepairActivities
    from relaunch.activities.reports import (
        WarmSpares,
        WatchedCheckpoints,
        WatchRanksInput,
        WatchReport,
    )
    from relaunch.activities.stop import UNPROVEN, StopRanksInput, UnprovenStop
    from relaunch.activities.watch import WatchActivities, heartbeat_timeout
    from relaunch.generation import Token
    from relaunch.job.drain import drains_at_checkpoint
    from relaunch.job.events import (
        Event,
        Launched,
        LaunchFailed,
        LaunchRefused,
        NodeRefusal,
        NodesExamined,
        RanksStopped,
        RepairEnded,
        StopUnproven,
        WorkflowReset,
    )
    from relaunch.job.fencing import living_generations, running_timeouts, will_fence
    from relaunch.job.ladder import FOREIGN_TIMEOUT, LINKS_TIMEOUT
    from relaunch.job.places import limit_places
    from relaunch.job.ranks import processes_of
    from relaunch.job.slow_nodes import MAX_OF_GENERATION, list_slow
    from relaunch.job.state import Examine, Incident, JobState, Phase, Repair, Slot, UnstoppedNode
    from relaunch.job.survivors import kills_survivors
    from relaunch.messages.ids import REPAIR_ID_PREFIX
    from relaunch.messages.jobs import NodeRepairInput, NodeRepairResult
    from relaunch.messages.nodes import ExamineNodesInput, FindForeignInput
    from relaunch.messages.seals import ORDER_AGAIN, PLAIN_PAYLOAD
    from relaunch.spec.policy import StragglerLimits

Answer = TypeVar("Answer")
UNPROVEN_STOP = TypeAdapter(tuple[UnprovenStop])
SHARD = 256
"""Nodes that one watch or launch activity serves. One activity per node would be thousands of
events a generation."""

BEAT = timedelta(seconds=6)
"""Heartbeat timeout of launches and stops, which heartbeat every second: how soon the work of a
dead worker is taken over."""
KEEP_TRYING = RetryPolicy(
    initial_interval=timedelta(milliseconds=200),
    backoff_coefficient=2.0,
    maximum_interval=timedelta(seconds=10),
)
"""For activities that may be repeated without effect. They end by an answer, never by a number of
attempts."""
REATTACH = RetryPolicy(
    initial_interval=timedelta(milliseconds=100),
    backoff_coefficient=2.0,
    maximum_interval=timedelta(seconds=5),
)
"""For watches: a new one re-attaches, so a retry spends nothing."""
REPAIR_MARGIN = timedelta(seconds=15)
"""Time between the end of a repair and the end of the wait for it."""
FOR_EVER = timedelta(days=3650)
"""For activities that end with an event in the world; the server requires a number."""
DETACH = ActivityCancellationType.WAIT_CANCELLATION_COMPLETED
"""A cancelled activity has let go of the nodes before the workflow continues."""


async def unless_cancelled(order: Awaitable[Answer]) -> Answer:
    """Await an activity.

    The SDK returns the result of an activity that completed although it was cancelled, and does not
    report the cancel: the cancelled caller would go on with work, or wait for results, that are no
    longer wanted.

    Raises:
        CancelledError: It was cancelled, whether or not the activity completed.
    """
    answer = await order
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
    return answer


def shards(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [names[first : first + SHARD] for first in range(0, len(names), SHARD)]


async def launch(
    job: JobState,
    token: Token,
    slots: tuple[Slot, ...],
    run: str,
    note: Callable[[LaunchRanksOutput], None],
) -> Event:
    """Prepare and start every shard; across shards this workflow is the barrier between the two
    rounds.

    `note` receives the output of each order, even if this is cancelled. If another run than `run`
    orders it, nothing is launched.
    """
    whole = [replace(order, run=run) for order in _launch_orders(job, token, slots)]
    if len(whole) == 1:
        return _outcome(job, token, [await _launch_shard(job, whole[0], "launch", note)])
    prepared = await asyncio.gather(
        *(_launch_shard(job, replace(order, prepare_only=True), "prepare", note) for order in whole)
    )
    if any(output.refusals or output.unreachable or output.was_reset for output in prepared):
        return _outcome(job, token, prepared)
    orders = start_orders(job, token, slots, [output.prepared for output in prepared])
    started = (_launch_shard(job, replace(order, run=run), "start", note) for order in orders)
    return _outcome(job, token, await asyncio.gather(*started))


def start_orders(
    job: JobState, token: Token, slots: tuple[Slot, ...], prepared: list[tuple[PreparedNode, ...]]
) -> list[LaunchRanksInput]:
    gang = make_gang([node for shard in prepared for node in shard])
    orders = zip(_launch_orders(job, token, slots), prepared, strict=True)
    return [replace(order, prepared=shard, gang=gang) for order, shard in orders]


def _launch_orders(job: JobState, token: Token, slots: tuple[Slot, ...]) -> list[LaunchRanksInput]:
    return [
        LaunchRanksInput(
            token=token,
            spec=job.spec,
            slots=slots[first : first + SHARD],
            timeouts=job.policy.timeouts,
            max_restarts=job.policy.max_restarts,
            fences=will_fence(job, len(slots)),
            first_group_rank=first,
            places=limit_places(job.places, (slot.node for slot in slots[first : first + SHARD])),
            kills_older=kills_survivors(job, token.generation - 1),
        )
        for first in range(0, len(slots), SHARD)
    ]


async def _launch_shard(
    job: JobState,
    order: LaunchRanksInput,
    verb: str,
    note: Callable[[LaunchRanksOutput], None],
) -> LaunchRanksOutput:
    names = tuple(slot.node for slot in order.slots)
    has_lost_answer = False

    async def send_order() -> LaunchRanksOutput:
        output = await workflow.execute_activity_method(
            JobActivities.launch_ranks,
            order,
            start_to_close_timeout=job.policy.timeouts.stop_grace + timedelta(minutes=2),
            heartbeat_timeout=BEAT,
            retry_policy=KEEP_TRYING,
            cancellation_type=DETACH,
            summary=f"{verb} generation {order.token.generation} on {_names(names)}",
        )
        note(output)
        return output

    while True:
        try:
            output = await unless_cancelled(send_order())
        except ActivityError as error:
            cause = error.cause
            if isinstance(cause, ApplicationError) and cause.type == PLAIN_PAYLOAD:
                has_lost_answer = True
                await workflow.sleep(
                    ORDER_AGAIN, summary=f"before {verb} of {_names(names)} is ordered again"
                )
                continue
            if isinstance(cause, ApplicationError) and cause.non_retryable:
                why = "secret_missing" if cause.type == "SecretMissing" else "controller"
                output = LaunchRanksOutput(refusals=(NodeRefusal(names[0], why, cause.message),))
            else:
                raise
        # What an attempt has started, it leaves to the next one, and that was lost with the answer.
        return replace(output, start_sent=True) if has_lost_answer else output


def _outcome(job: JobState, token: Token, outputs: list[LaunchRanksOutput]) -> Event:
    """Return the outcome of a launch: refused beats unreachable beats success, over all shards."""
    if any(output.was_reset for output in outputs):
        submission = int(workflow.now().timestamp() * 1000)
        return WorkflowReset(max(submission, job.submission + 1))
    places = {node: place for output in outputs for node, place in output.places.items()}
    if refusals := tuple(refusal for output in outputs for refusal in output.refusals):
        started = any(output.start_sent for output in outputs)
        return LaunchRefused(token.generation, refusals, started=started, places=places)
    if unreachable := tuple(node for output in outputs for node in output.unreachable):
        started = any(output.start_sent for output in outputs)
        reason = next(output.reason for output in outputs if output.unreachable)
        # A node that did not answer may still take the order to start, as long as it is valid.
        within = job.policy.timeouts.valid_for if started else timedelta(0)
        elsewhere = tuple(node for output in outputs for node in output.elsewhere)
        return LaunchFailed(
            token.generation, unreachable, started, within, reason, places, elsewhere
        )
    stopped = [output.stopped_at for output in outputs if output.stopped_at is not None]
    started_at = [output.started_at for output in outputs if output.started_at is not None]
    step, reached_in = find_last_step(outputs)
    return Launched(
        token.generation,
        max(stopped),
        max(started_at),
        places,
        step=step,
        step_generation=reached_in,
        warm=next((output.warm for output in outputs if output.warm), ""),
    )


async def watch(
    job: JobState,
    nodes: tuple[str, ...],
    after_seq: dict[str, int],
    exited: dict[str, tuple[int, ...]],
) -> WatchReport:
    timeouts = running_timeouts(job)
    names = set(nodes)
    return await workflow.execute_activity_method(
        WatchActivities.watch_ranks,
        WatchRanksInput(
            token=job.token,
            fleet=job.spec.fleet,
            nodes=nodes,
            ranks_per_node=job.spec.processes_per_node,
            launched_at=job.launched_at or workflow.now(),
            timeouts=timeouts,
            hang=job.policy.hang,
            after_seq={node: seq for node, seq in after_seq.items() if node in names},
            exited={node: ranks for node, ranks in exited.items() if node in names},
            lost=tuple(node for node in job.lost_names if node in names),
            launched=job.launched_at is not None,
            lost_in_others=not names.issuperset(job.lost_names),
            elsewhere=tuple(
                lost.node for lost in job.lost if lost.is_elsewhere and lost.node in names
            ),
            # A question stays open until it is answered, whatever stands still meanwhile.
            hang_known=job.deferred_fault is not None or job.phase is Phase.WAITING_FOR_PERSON,
            # One shard reports it for all: each watch that did would end, and would have to be
            # replaced.
            report_at_step=job.report_at_step if nodes[0] == job.slots[0].node else None,
            progress_expected=job.furthest_step is not None or job.progress is not None,
            report_checkpoint=bool(drains_at_checkpoint(job)),
            first_rank=_first_rank(job, nodes[0]),
            world_size=job.spec.world_size,
            places=limit_places(job.places, nodes),
            training_ranks_per_node=job.spec.ranks_per_node,
            others=tuple(slot.node for slot in job.slots if slot.node not in names)
            if nodes[0] == job.slots[0].node
            else (),
            judges=nodes[0] == job.slots[0].node,
            in_lockstep=job.spec.gang == "lockstep",
            stragglers=job.policy.stragglers
            if len(list_slow(job)) < MAX_OF_GENERATION
            else StragglerLimits(action="off"),
            slow=tuple(one.slow.node for one in list_slow(job)),
            checkpoints=_find_watched_checkpoints(job) if nodes[0] == job.slots[0].node else None,
            warm=_find_warm_spares(job) if nodes[0] == job.slots[0].node else None,
        ),
        start_to_close_timeout=FOR_EVER,
        heartbeat_timeout=heartbeat_timeout(timeouts),
        retry_policy=REATTACH,
        cancellation_type=DETACH,
        # The web UI cuts summaries: names, which may be long, come last.
        summary=f"watch generation {job.generation}"
        + (
            f" until it passes step {job.incident.reached}"
            if job.incident and job.incident.reached is not None
            else ""
        )
        + (" until a checkpoint is finished" if drains_at_checkpoint(job) else "")
        + f" on {_names(nodes)}",
    )


def _find_watched_checkpoints(job: JobState) -> WatchedCheckpoints | None:
    folder = job.spec.checkpoint
    if folder is None or folder.expression is None:
        return None
    return WatchedCheckpoints(folder.directory, job.spec.workdir, folder.expression)


def _find_warm_spares(job: JobState) -> WarmSpares | None:
    """Return what spares may import ahead. The fleet file, which only workers read, may add it."""
    if job.spec.warm == () or job.spec.launcher != "none":
        return None
    gpus = tuple(range(len(job.slots[0].gpus)))
    return WarmSpares(job.spec, len(job.slots), job.policy.max_restarts, gpus)


def _first_rank(job: JobState, node: str) -> int | None:
    """Return the number of the first process of a node, the first of its shard; None if it has left
    the job."""
    groups = (group for group, slot in enumerate(job.slots) if slot.node == node)
    return next((processes_of(group, job.spec)[0] for group in groups), None)


async def stop_ranks(
    job: JobState, generation: int, nodes: tuple[str, ...], summary: str, *, once: bool = False
) -> RanksStopped | StopUnproven:
    """Stop a generation and all earlier ones.

    Returns when every node is proven clean or must have fenced, or when it was tried for long and
    no time will prove it; with `once`, after one try.
    """
    times = job.policy.timeouts
    unreachable = f" (must fence first: {_names(job.lost_names)})" if job.lost and not once else ""
    order = unless_cancelled(
        workflow.execute_activity_method(
            JobActivities.stop_ranks,
            StopRanksInput(
                token=replace(job.token, generation=generation),
                fleet=job.spec.fleet,
                nodes=nodes,
                timeouts=times,
                gang_size=job.spec.node_count,
                # The silence at the time of the report: the time since then is known only by the
                # server's clock, which may be stepped.
                unheard_for=tuple((lost.node, lost.unheard_for) for lost in job.lost),
                once=once,
                generations=living_generations(job),
                places=limit_places(job.places, nodes),
                log_pattern=job.spec.progress.pattern,
                kills=kills_survivors(job, generation),
                ask_after=times.answer_within if job.unstopped else times.ask_after,
            ),
            start_to_close_timeout=FOR_EVER,
            heartbeat_timeout=BEAT,
            retry_policy=KEEP_TRYING,
            cancellation_type=DETACH,
            summary=f"{summary}{unreachable} on {_names(nodes)}",
        )
    )
    try:
        stopped = await order
    except ActivityError as error:
        cause = error.cause
        if not (isinstance(cause, ApplicationError) and cause.type == UNPROVEN):
            raise
        return _read_unproven(job, nodes, cause.details)
    return RanksStopped(
        job.generation, stopped.nodes, stopped.at, stopped.fenced, step=stopped.step
    )


def _read_unproven(job: JobState, nodes: tuple[str, ...], details: Sequence[Any]) -> StopUnproven:
    try:
        (found,) = UNPROVEN_STOP.validate_python(details)
    except ValidationError:  # of another release: what it says may wait, the stop may not
        return StopUnproven(job.generation, tuple(UnstoppedNode(node, "") for node in nodes))
    return StopUnproven(job.generation, found.unstopped, found.stopped)


async def examine(job: JobState, decision: Examine) -> NodesExamined:
    """Have the suspects examined, which have no ranks any more.

    The node's kernel log counts from the launch of this generation.
    """
    level, within = job.policy.dcgm_level, job.policy.timeouts.examination
    examined = await unless_cancelled(
        workflow.execute_activity_method(
            NodeActivities.examine_nodes,
            ExamineNodesInput(
                fleet=job.spec.fleet,
                nodes=decision.nodes,
                id=f"{job.name}/{job.generation}",
                level=level,
                within=within,
                kernel_since=workflow.now() - job.launched_at if job.launched_at else None,
                catalog=job.policy.catalog,
            ),
            start_to_close_timeout=within,
            heartbeat_timeout=BEAT,
            retry_policy=KEEP_TRYING,
            cancellation_type=DETACH,
            summary=f"examine {_names(decision.nodes)}"
            + (f" (dcgmi diag -r {level} where there are GPUs)" if level else ""),
        )
    )
    return NodesExamined(job.generation, examined)


async def find_foreign_processes(job: JobState, decision: Examine) -> NodesExamined:
    """Ask nodes, which have no ranks of the job any more, who uses its GPUs there."""
    slots = tuple(slot for slot in job.slots if slot.node in decision.nodes)
    foreign = await unless_cancelled(
        workflow.execute_activity_method(
            NodeActivities.find_foreign_processes,
            FindForeignInput(job.spec.fleet, slots),
            start_to_close_timeout=FOREIGN_TIMEOUT,
            heartbeat_timeout=BEAT,
            retry_policy=KEEP_TRYING,
            cancellation_type=DETACH,
            summary=f"ask {_names(decision.nodes)} who uses its GPUs",
        )
    )
    return NodesExamined(job.generation, (), foreign=foreign)


async def check_links(job: JobState) -> NodesExamined:
    """Have the nodes of the gang, which have no ranks any more, call each other."""
    names = tuple(slot.node for slot in job.slots)
    links = await unless_cancelled(
        workflow.execute_activity_method(
            LinkActivities.check_links,
            CheckLinksInput(job.spec.fleet, job.slots, job.broken_links),
            start_to_close_timeout=LINKS_TIMEOUT,
            heartbeat_timeout=BEAT,
            retry_policy=KEEP_TRYING,
            cancellation_type=DETACH,
            summary=f"have {_names(names)} call each other",
        )
    )
    return NodesExamined(job.generation, (), links=links)


async def repair(
    job: JobState,
    decision: Repair,
    followed: Mapping[str, str],
    report_begin: Callable[[str, str], None],
) -> RepairEnded:
    """Have every suspect repaired, each by a child workflow.

    The workflow's id names the node, so there is never a second repair of it.

    Args:
        job: The job that waits for them.
        decision: What is repaired.
        followed: The run id of each repair that an earlier run of this workflow has begun, by node.
        report_begin: Called with the node and the run id of each repair that begins; with an empty
            run id if it is refused.
    """

    async def repair_one(node: str) -> NodeRepairResult:
        if run_id := followed.get(node):
            return await _follow_repair(job, node, run_id)
        return await _repair_one(job, decision, node, report_begin)

    ended = await asyncio.gather(*(repair_one(node) for node in decision.nodes))
    worst = next((one for one in ended if one.outcome != "done"), None)
    reason = worst.reason if worst else "; ".join(one.reason for one in ended[:4])
    return RepairEnded(
        job.generation,
        decision.strategy,
        decision.nodes,
        worst.outcome if worst else "done",
        reason,
    )


async def _repair_one(
    job: JobState, decision: Repair, node: str, report_begin: Callable[[str, str], None]
) -> NodeRepairResult:
    id_ = _repair_id(job, node)
    try:
        repair = await workflow.start_child_workflow(
            "NodeRepair",
            NodeRepairInput(
                fleet=job.spec.fleet,
                node=node,
                strategy=decision.strategy,
                gpus=decision.gpus if node == decision.nodes[0] else (),
                reason=decision.fault.reason,
                by=f"job {job.name}",
                job=job.name,
                level=job.policy.dcgm_level,
                catalog=job.policy.catalog,
                # The repair ends, and reports how, before this job stops waiting for it.
                deadline=decision.until - REPAIR_MARGIN,
                answer_within=job.policy.timeouts.answer_within,
            ),
            id=id_,
            result_type=NodeRepairResult,
            # A repair that has begun is completed, whatever happens to the job.
            parent_close_policy=ParentClosePolicy.ABANDON,
            cancellation_type=ChildWorkflowCancellationType.TRY_CANCEL,
            static_summary=f"{decision.strategy} of {node} for job {job.name}",
        )
        report_begin(node, repair.first_execution_run_id or "")
        ended: NodeRepairResult = await repair
        return ended
    except WorkflowAlreadyStartedError:
        report_begin(node, "")
        return NodeRepairResult(node, "refused", f"another repair of {node} is under way ({id_})")
    except ChildWorkflowError as error:
        if is_cancelled_exception(error):
            raise
        return NodeRepairResult(
            node,
            "ambiguous",
            f"the repair of {node} was ended from outside: {error.cause or error}",
        )


async def _follow_repair(job: JobState, node: str, run_id: str) -> NodeRepairResult:
    """Wait for a repair that an earlier run of this workflow has begun: its child is not ours."""
    id_ = _repair_id(job, node)
    try:
        return await unless_cancelled(
            workflow.execute_activity_method(
                RepairActivities.follow_repair,
                FollowRepairInput(node, id_, run_id),
                start_to_close_timeout=FOR_EVER,
                heartbeat_timeout=BEAT,
                retry_policy=KEEP_TRYING,
                summary=f"wait for the repair of {node}",
            )
        )
    except (ActivityError, asyncio.CancelledError) as error:
        if is_cancelled_exception(error):
            # As with a child: it is obeyed until an order was given.
            await workflow.get_external_workflow_handle(id_, run_id=run_id).cancel()
        raise


def _repair_id(job: JobState, node: str) -> str:
    return f"{REPAIR_ID_PREFIX}{job.spec.fleet}/{node}"


async def archive(job: JobState, incidents: tuple[Incident, ...]) -> None:
    await workflow.execute_activity_method(
        RecordActivities.archive_incidents,
        ArchiveIncidentsInput(job.namespace, job.name, incidents),
        start_to_close_timeout=timedelta(minutes=1),
        retry_policy=KEEP_TRYING,
        summary=f"archive {len(incidents)} closed incidents",
    )


def _names(names: tuple[str, ...]) -> str:
    """Return the names in short, for a summary, which holds 200 bytes."""
    return (
        ", ".join(names[:3])
        if len(names) <= 3
        else f"{', '.join(names[:2])} and {len(names) - 2} more nodes"
    )
