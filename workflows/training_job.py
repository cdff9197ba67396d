"""One submission of a job, durably: takes events from its inbox one by one, decides by `recovery`, carries out.

It holds no rank and no connection: what it starts lives on the nodes, and what it waits for survives any crash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from pydantic import ValidationError

    from activities.watch import WatchReport
    from recovery.decide import decide
    from recovery.events import (
        CancelRequested,
        DeadlinePassed,
        Event,
        IncidentsArchived,
        MessageRejected,
        NodesAcquired,
        NodesMissing,
        PolicyChanged,
        RanksFound,
        RanksSucceeded,
        Submitted,
    )
    from recovery.evolve import absorb, evolve, finish, resubmit
    from recovery.model import Ask, Decision, Ignore, JobState, Phase, Relaunch, Stop, Wait
    from recovery.ranks import seat
    from workflows import orders
    from workflows.messages import (
        Carried,
        JobResult,
        PolicyMessage,
        TrainingJobInput,
        cancel_event,
        explain,
        overlay,
        report_event,
        retry_event,
    )
    from workflows.search_attributes import attributes, current_details, memo, updates

KEPT_INCIDENTS = 10
"""Closed ones in the state; beyond it the older half goes to the archive. A state must stay below 512 KiB."""


@workflow.defn
class TrainingJob:
    @workflow.init
    def __init__(self, start: TrainingJobInput) -> None:
        info = workflow.info()
        submission = int(info.workflow_start_time.timestamp() * 1000)
        now = workflow.now()
        self._inbox: list[Event] = list(start.carried.inbox)
        self._after_seq: dict[str, int] = dict(start.carried.after_seq)
        self._act: asyncio.Task[None] | None = None
        self._watches: dict[int, asyncio.Task[None]] = {}
        self._succeeded: set[int] = set()
        self._archiving: asyncio.Task[None] | None = None
        self._timer: asyncio.Task[None] | None = None
        self._deadline: datetime | None = None
        self._attributes: dict[str, object] = {}
        self._memo: dict[str, object] = {}
        if start.resume is not None:
            self._job = start.resume
            self._attributes, self._memo = attributes(self._job), memo(self._job)
            return
        if start.previous is not None:
            self._job = resubmit(start.previous, submission, start.submitted_by, now, start.renew_budgets, start.avoid_nodes)
            self._job = replace(self._job, spec=start.spec, policy=start.policy)
        else:
            self._job = JobState(
                namespace=info.namespace,
                name=start.spec.name,
                submission=submission,
                spec=start.spec,
                policy=start.policy,
                submitted_by=start.submitted_by,
                submitted_at=now,
            )
        self._inbox.append(Submitted(start.because, start.submitted_by))

    @workflow.run
    async def run(self, start: TrainingJobInput) -> JobResult:
        if start.resume is not None:
            self._watch()
            self._set_deadline(start.carried.deadline)
        while True:
            try:
                await workflow.wait_condition(lambda: bool(self._inbox) or self._may_end())
            except asyncio.CancelledError as error:
                # A cancel of the workflow is a cancel of the job: its ranks are stopped before it ends.
                self._inbox.append(
                    CancelRequested(because=workflow.cancellation_reason() or str(error) or "the workflow was cancelled", by="")
                )
            while self._inbox:
                self._take(self._inbox.pop(0))
            self._publish()
            if self._may_end():
                return await self._end()
            if workflow.info().is_continue_as_new_suggested() and self._may_continue_as_new():
                await self._continue_as_new()

    # --- one event, one decision

    def _take(self, event: Event) -> None:
        now = workflow.now()
        self._job = absorb(self._job, event, now)
        decision = decide(self._job, event, now)
        self._job = evolve(self._job, decision, now)
        if not isinstance(decision, Ignore):
            workflow.logger.info("%s -> %s: %s", event.kind, decision.kind, decision.because, extra={"generation": self._job.generation})
        self._carry_out(decision)
        if len(self._job.incidents) > KEPT_INCIDENTS and self._archiving is None:
            self._archiving = asyncio.create_task(self._archive())

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Relaunch():
                self._set_deadline(None)
                self._stop_watching()
                self._replace_act(self._relaunch(decision))
            case Stop():
                self._set_deadline(None)
                self._stop_watching()
                self._replace_act(self._stop(once=decision.phase is Phase.SUCCEEDED))
            case Ask():
                self._set_deadline(self._job.next.at)
                if self._job.lost:
                    self._watch()  # a node that comes back answers the question by itself
                else:
                    self._stop_watching()
                    self._replace_act(self._stop(once=True))
            case Wait():
                self._set_deadline(decision.until)
                if decision.phase in (Phase.RUNNING, Phase.NODE_LOST):
                    self._watch()
            case Ignore():
                if self._act is None and self._job.phase in (Phase.RUNNING, Phase.NODE_LOST):
                    self._watch()

    def _replace_act(self, act: Awaitable[None]) -> None:
        if self._act is not None and not self._act.done():
            self._act.cancel()

        async def carry_out() -> None:
            try:
                await act
            except ActivityError as error:
                if is_cancelled_exception(error):
                    return
                raise

        self._act = asyncio.create_task(carry_out())

    # --- launching

    async def _relaunch(self, decision: Relaunch) -> None:
        if decision.delay:
            await workflow.sleep(decision.delay.total_seconds(), summary=f"delay before generation {decision.generation}")
        excluded = tuple(dict.fromkeys((*decision.without, *(avoided.node for avoided in self._job.avoided))))
        places = tuple((slot.node, slot.address) for slot in self._job.slots)
        if not decision.keep_nodes or not places or any(name in excluded for name, _ in places):
            places = await self._acquire(decision, excluded)
            if not places:
                return
        left_out = [node for node in self._job.maybe_alive if node not in {name for name, _ in places}]
        if left_out:
            # Everywhere, not only there: a node that was cut off stops itself only when some other node no longer vouches for it.
            before = decision.generation - 1
            gone = await orders.prove_gone(self._job, before, self._job.maybe_alive, f"stop generation {before} before another starts")
            self._inbox.append(gone)
        slots = seat(self._job.slots, places)
        self._inbox.append(NodesAcquired(slots))
        token = replace(self._job.token, generation=decision.generation)
        self._inbox.append(await orders.launch(self._job, token, slots))

    async def _acquire(self, decision: Relaunch, excluded: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
        answer = await orders.acquire(self._job, decision, excluded, wait=False)
        if not answer.nodes:
            self._inbox.append(NodesMissing(answer.because, answer.hopeless))
            if answer.hopeless:
                return ()
            answer = await orders.acquire(self._job, decision, excluded, wait=True)
        if answer.holding:
            self._inbox.append(RanksFound(answer.holding))
            await workflow.wait_condition(lambda: set(answer.holding) <= set(self._job.maybe_alive))
        return answer.nodes

    # --- watching

    def _watch(self) -> None:
        """Keep one watch per shard; those that run are left alone."""
        for index, nodes in enumerate(orders.shards(tuple(slot.node for slot in self._job.slots))):
            running = self._watches.get(index)
            if index not in self._succeeded and (running is None or running.done()):
                self._watches[index] = asyncio.create_task(self._watch_shard(index, nodes))

    async def _watch_shard(self, index: int, nodes: tuple[str, ...]) -> None:
        generation = self._job.generation
        try:
            report = await orders.watch(self._job, nodes, self._after_seq)
        except ActivityError as error:
            if is_cancelled_exception(error):
                return
            raise
        self._report(generation, index, report)

    def _report(self, generation: int, index: int, report: WatchReport) -> None:
        if generation != self._job.generation:
            return
        self._after_seq.update(report.after_seq)
        self._inbox.extend(report.events)
        if report.all_succeeded:
            self._succeeded.add(index)
            if len(self._succeeded) == len(orders.shards(tuple(slot.node for slot in self._job.slots))):
                self._inbox.append(RanksSucceeded(generation))

    def _stop_watching(self) -> None:
        for watch in self._watches.values():
            watch.cancel()
        self._watches, self._after_seq, self._succeeded = {}, {}, set()

    # --- stopping

    async def _stop(self, *, once: bool) -> None:
        nodes = tuple(dict.fromkeys((*self._job.maybe_alive, *(slot.node for slot in self._job.slots))))
        if nodes:
            generation = self._job.generation
            what = "clean up after" if once else "stop"
            self._inbox.append(await orders.prove_gone(self._job, generation, nodes, f"{what} generation {generation}", once=once))

    # --- ends

    def _may_end(self) -> bool:
        return self._job.ending is not None and not self._inbox and self._act is not None and self._act.done()

    async def _end(self) -> JobResult:
        if self._act is not None:
            await self._act  # raises what it met
        if self._archiving is not None:
            await self._archiving
        assert self._job.ending is not None
        self._job = finish(self._job, workflow.now())
        self._publish()
        await workflow.wait_condition(workflow.all_handlers_finished)
        job, ending = self._job, self._job.ending
        assert ending is not None
        result = JobResult(job.name, job.phase, ending.exit_code, job.because, job.generation, job.incidents, job.incidents_archived, job)
        if job.phase is Phase.FAILED:
            # Red in the web UI's list, with the reason; the result rides in the details.
            raise ApplicationError(job.because, result, type="JobFailed", non_retryable=True)
        return result

    def _may_continue_as_new(self) -> bool:
        """Only while nothing but watching goes on: an order to nodes is never left half-way."""
        return (self._act is None or self._act.done()) and self._archiving is None and self._job.ending is None

    async def _continue_as_new(self) -> None:
        watching = [watch for watch in self._watches.values() if not watch.done()]
        for watch in watching:
            watch.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await workflow.wait_condition(workflow.all_handlers_finished)
        carried = Carried(tuple(self._inbox), self._after_seq, self._deadline)
        workflow.continue_as_new(TrainingJobInput(spec=self._job.spec, policy=self._job.policy, resume=self._job, carried=carried))

    async def _archive(self) -> None:
        incidents = self._job.incidents[: KEPT_INCIDENTS // 2]
        await orders.archive(self._job, incidents)
        self._archiving = None
        self._inbox.append(IncidentsArchived(len(incidents)))

    # --- what people see

    def _publish(self) -> None:
        now = workflow.now()
        workflow.set_current_details(current_details(self._job, now))
        wanted = attributes(self._job)
        if changes := updates(self._attributes, wanted):
            workflow.upsert_search_attributes(changes)
            self._attributes = wanted
        page = memo(self._job)
        if page != self._memo:
            workflow.upsert_memo(page)
            self._memo = page

    def _set_deadline(self, until: datetime | None) -> None:
        if until == self._deadline and self._timer is not None and not self._timer.done():
            return
        if self._timer is not None:
            self._timer.cancel()
        self._deadline, self._timer = until, None
        if until is not None:
            self._timer = asyncio.create_task(self._pass_deadline(until, f"if nothing happens: {self._job.next.what}"[:200]))

    async def _pass_deadline(self, until: datetime, summary: str) -> None:
        await workflow.sleep(max(0.0, (until - workflow.now()).total_seconds()), summary=summary)
        if self._deadline == until:
            self._deadline = None
            self._inbox.append(DeadlinePassed())

    # --- what people send: anything at all may arrive, nothing raises

    @workflow.signal(description='Stop every rank and end the job. {"because": "…", "by": "…"}, all optional.')
    def cancel(self, message: Any = None) -> None:
        self._receive("cancel", message, cancel_event)

    @workflow.signal(description='Launch a new generation now. {"because", "by", "avoid_nodes": [], "renew_budgets": false}, all optional.')
    def force_retry(self, message: Any = None) -> None:
        self._receive("force_retry", message, retry_event)

    @workflow.signal(description='Vouch for a node: {"node": "n2", "declared": "dead", "because": "…", "by": "…"}.')
    def report(self, message: Any = None) -> None:
        self._receive("report", message, report_event)

    def _receive(self, name: str, message: Any, parse: Callable[[Any], Event]) -> None:
        try:
            self._inbox.append(parse({} if message in (None, "") else message))
        except ValidationError as error:
            self._inbox.append(MessageRejected(name, explain(error)))

    @workflow.update(description='Lay keys over the policy, from now on: {"policy": {"max_restarts": 12}, "because": "…", "by": "…"}.')
    def change_policy(self, message: Any = None) -> str:
        changed = PolicyMessage.model_validate(message or {})
        self._inbox.append(PolicyChanged(overlay(self._job.policy, changed.policy), changed.because, changed.by))
        return "the policy is in force from the next decision on"

    @change_policy.validator
    def _check_policy(self, message: Any = None) -> None:
        try:
            changed = PolicyMessage.model_validate(message or {})
            overlay(self._job.policy, changed.policy)
        except ValidationError as error:
            raise ApplicationError(explain(error), type="BadInput", non_retryable=True) from None
        if not changed.policy:
            raise ApplicationError("policy: missing, expected the keys to change", type="BadInput", non_retryable=True)

    @workflow.query(description="Everything the job knows about itself.")
    def state(self) -> JobState:
        return self._job

    @workflow.query(description="What happens next, and when.")
    def next(self) -> dict[str, str | None]:
        at = self._job.next.at
        return {"what": self._job.next.what, "at": at.isoformat() if at else None}
