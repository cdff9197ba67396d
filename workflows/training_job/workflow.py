"""Workflow of one submission of a job: takes events from its inbox one by one, decides, and carries
out the decision.

It holds no rank and no connection: what it starts lives on the nodes, and what it waits for
survives any crash.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from temporalio import workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from relaunch.access.orders import read_signed
    from relaunch.job.apply import finish, resubmit
    from relaunch.job.events import (
        CancelRequested,
        CheckpointSaved,
        Event,
        IncidentsArchived,
        NodeDeclaredDead,
        NodeReturned,
        NodesAcquired,
        NodesGranted,
        NodesOffered,
        NodesSlow,
        StopUnproven,
        Submitted,
        SubmitterChecked,
        WorkflowReset,
    )
    from relaunch.job.rules import is_open_question
    from relaunch.job.state import (
        Ask,
        Decision,
        Examine,
        Ignore,
        JobState,
        Phase,
        Relaunch,
        Repair,
        Stop,
        Wait,
    )
    from relaunch.job.step import find_rules, step
    from relaunch.messages.jobs import (
        CarriedState,
        ClaimsCarried,
        JobResult,
        TrainingJobInput,
    )
    from relaunch.spec.policy import Strategy
    from relaunch.workflows.builds import continue_as_new, is_build_outdated
    from relaunch.workflows.notifier.tell import finish_telling
    from relaunch.workflows.search_attributes import attributes, current_details, memo, updates
    from relaunch.workflows.training_job import commands
    from relaunch.workflows.training_job.actions import Actions
    from relaunch.workflows.training_job.claims import Claims
    from relaunch.workflows.training_job.deadline import Deadline
    from relaunch.workflows.training_job.drains import DrainTimers
    from relaunch.workflows.training_job.handlers import MessageHandlers
    from relaunch.workflows.training_job.metrics import record_changes, record_end
    from relaunch.workflows.training_job.notices import Notices
    from relaunch.workflows.training_job.orders import Orders
    from relaunch.workflows.training_job.session import Session
    from relaunch.workflows.training_job.traces import hand_over_incidents
    from relaunch.workflows.training_job.watches import Watches

LINKS_PATCH = "check-links"
"""Marks histories in which links between nodes are checked before a restart."""
FOREIGN_PATCH = "check-foreign-processes"
"""Marks histories in which the node of a GPU that ran out of memory is asked who uses it."""
MEMO_PATCH = "restore-memo"
"""Marks histories of runs that 0.1.0 continued as new without the memo, in which it is published
again."""
ASK_PATCH = "ask-instead-of-launching"
"""Marks histories in which a question ends a launch or repair that waits for a lost node."""
SLOW_PATCH = "forget-slow-nodes"
"""Marks histories of submissions that do not begin with the slow nodes of the one before."""
NEW_KINDS = (StopUnproven, SubmitterChecked)
MAX_INCIDENTS = 10
"""Closed incidents kept in the state; beyond that the older half is archived. A state must stay
below 512 KiB."""


@workflow.defn
class TrainingJob(MessageHandlers):
    @workflow.init
    def __init__(self, start: TrainingJobInput) -> None:
        carried = start.carried
        self._session = Session(_first_state(start), carried.inbox)
        self._orders = Orders(self._session, carried.orders)
        self._claims = Claims(self._session, carried.claims if start.resume else _sign(start))
        self._actions = Actions(self._session, self._claims, carried.dead, carried.action)
        self._watches = Watches(self._session, carried.after_seq, carried.exited)
        self._drain_timers = DrainTimers(self._session)
        self._deadline = Deadline(self._session)
        self._notices = Notices(self._session, carried.last_notice)
        self._archiving: asyncio.Task[None] | None = None
        self._hides_causes = start.hides_causes
        self._attributes: dict[str, object] = {}
        """The search attributes, as last published."""
        self._memo: dict[str, object] = {}
        if start.resume is not None:
            self._attributes = attributes(start.resume, self._hides_causes)
            self._memo = memo(start.resume)
        else:
            self._session.post(Submitted(start.reason, start.submitted_by))

    @workflow.run
    async def run(self, start: TrainingJobInput) -> JobResult:
        session = self._session
        if start.resume is not None and workflow.info().continued_run_id is None:
            # A job that is started by hand must not bring nodes, ranks and repairs along.
            raise ApplicationError(
                "resume: only a run that continues another has it", non_retryable=True
            )
        if start.resume is not None:
            if "fleet" not in workflow.memo() and workflow.patched(MEMO_PATCH):
                self._memo = {}
                self._publish()
            self._watches.start()
            self._deadline.set(start.carried.deadline)
            self._drain_timers.update()
            self._notices.post_again(start.carried.notices)
        else:
            self._notices.resolve_failure(start.previous)
        while True:
            try:
                await workflow.wait_condition(
                    lambda: (
                        bool(session.inbox)
                        or self._actions.has_to_resume
                        or self._may_end()
                        or self._continues_as_new()
                        or session.tasks.find_error() is not None
                    )
                )
            except asyncio.CancelledError as error:
                self._take_order("cancel", _cancel_request(error), None)
            if (bug := session.tasks.find_error()) is not None:
                # It fails the workflow task, not the workflow: the server shows it and
                # retries until it is fixed.
                raise RuntimeError(f"unexpected error of a background task: {bug}") from bug
            while session.inbox:
                self._take(session.inbox.pop(0))
            self._actions.resume()
            self._drain_timers.update()
            self._watches.report_checkpoints()
            self._claims.update_growth_time()
            self._claims.claim_nodes_wanted_again()
            self._claims.start_fault_report()
            self._publish()
            self._notices.send_news()
            if self._may_end():
                return await self._end()
            if self._continues_as_new():
                await self._continue_as_new()

    # --- one event, one decision

    def _take(self, event: Event) -> None:
        session = self._session
        before = session.job
        waited_for = before.maybe_alive
        known = before.slow_nodes
        watches = self._watches.running
        session.job, decision = self._step(event)
        record_changes(before, session.job)
        hand_over_incidents(session.job)
        if not isinstance(decision, Ignore):
            workflow.logger.info(
                "%s -> %s: %s",
                event.kind,
                decision.kind,
                decision.reason,
                extra={"generation": session.job.generation},
            )
        match event:
            case NodesAcquired():
                used = {slot.node for slot in event.slots}
                self._actions.dead = tuple(one for one in self._actions.dead if one not in used)
            case NodeDeclaredDead():
                self._act_without(event.node, decision, waited_for)
            case WorkflowReset() if session.job.ending is None:
                self._claims.forget()
        if _ends_growth(event, decision):
            self._claims.cancel_growth()
        self._carry_out(decision)
        if session.job.slow_nodes != known:
            self._notices.report_slow_nodes()
        match event:
            case NodesOffered() if isinstance(decision, Wait):
                self._claims.start_growth()
            case CheckpointSaved() | NodesSlow() if isinstance(decision, Ignore):
                self._watches.start()  # the watch that saw it has ended
            case _ if isinstance(decision, Ignore) and is_open_question(session.job, event):
                self._watches.start()
            case NodeReturned() if before.phase is Phase.WAITING_FOR_PERSON:
                self._watches.renew(watches)
            case NodesAcquired() if session.job.phase is Phase.WAITING_FOR_PERSON:
                self._actions.give_up_launch()
        if len(session.job.incidents) > MAX_INCIDENTS and self._archiving is None:
            self._archiving = session.tasks.start("archive incidents", self._archive())

    def _step(self, event: Event) -> tuple[JobState, Decision]:
        job, now = self._session.job, workflow.now()
        rules = find_rules(job, event, now, workflow.patched)
        after, decision = step(job, event, now, rules)
        if not isinstance(decision, Examine):
            return after, decision
        if decision.links and not workflow.patched(LINKS_PATCH):
            check = "check_links"
        elif decision.foreign_processes and not workflow.patched(FOREIGN_PATCH):
            check = "check_foreign_processes"
        else:
            return after, decision
        # A history of before this was checked: decide as it was decided then.
        unchecked = job.policy.model_copy(update={check: False})
        after, decision = step(replace(job, policy=unchecked), event, now, rules)
        return replace(after, policy=job.policy), decision

    def _act_without(self, node: str, decision: Decision, waited_for: tuple[str, ...]) -> None:
        """Begin an action again that waits for a node which a person has declared dead."""
        actions, job = self._actions, self._session.job
        actions.dead = tuple(dict.fromkeys((*actions.dead, node)))
        if job.ending is not None:
            actions.stop(once=job.ending.phase is Phase.SUCCEEDED)
        elif (
            isinstance(decision, Ignore) and node in waited_for and actions.relaunching is not None
        ):
            # The node is of an earlier submission: its ranks are stopped before the launch, which
            # then continues.
            actions.relaunch(actions.relaunching)

    def _carry_out(self, decision: Decision) -> None:
        if not isinstance(decision, Ignore | Wait):
            self._actions.relaunching = None
        match decision:
            case Relaunch():
                self._deadline.set(None)
                self._watches.stop()
                self._actions.relaunch(decision)
            case Stop():
                self._deadline.set(None)
                self._watches.stop()
                self._actions.stop(once=decision.phase is Phase.SUCCEEDED)
            case Examine() | Repair():
                self._deadline.set(decision.until)
                self._watches.stop()
                self._actions.treat(decision)
            case Ask():
                self._deadline.set(self._session.job.next.at)
                self._claims.start_count()
                is_running = bool(self._session.job.lost)
                if is_running and self._actions.is_under_way and workflow.patched(ASK_PATCH):
                    is_running = False  # those ranks are being stopped for a launch or a repair
                if is_running:
                    self._watches.start()  # a node that comes back answers the question by itself
                else:
                    self._watches.stop()
                    self._actions.release(returns=decision.reminders > 0)
            case Wait():
                self._deadline.set(decision.until)
                if decision.phase in (Phase.RUNNING, Phase.NODE_LOST):
                    self._watches.start()
            case Ignore():
                if not self._actions.has_begun:
                    self._watches.start()

    async def _archive(self) -> None:
        incidents = self._session.job.incidents[: MAX_INCIDENTS // 2]
        await commands.archive(self._session.job, incidents)
        self._archiving = None
        self._session.post(IncidentsArchived(len(incidents)))

    # --- the job's page

    def _publish(self) -> None:
        job = self._session.job
        workflow.set_current_details(current_details(job, workflow.now()))
        current = attributes(job, self._hides_causes)
        if changes := updates(self._attributes, current):
            workflow.upsert_search_attributes(changes)
            self._attributes = current
        page = memo(job)
        if page != self._memo:
            workflow.upsert_memo(page)
            self._memo = page

    # --- end and continue-as-new

    def _may_end(self) -> bool:
        session = self._session
        return session.job.ending is not None and not session.inbox and self._actions.is_done

    async def _end(self) -> JobResult:
        session = self._session
        await self._actions.wait()
        if self._archiving is not None:
            await _settle([self._archiving])  # a cancel changes nothing any more
        await _settle([session.tasks.start("return nodes", self._claims.return_nodes())])
        before = session.job
        session.job = finish(before, workflow.now())
        record_changes(before, session.job)
        record_end(session.job)
        hand_over_incidents(session.job)
        self._publish()
        self._notices.send_news()
        if (telling := self._notices.sending) is not None and not telling.done():
            if self._notices.is_carried:
                await finish_telling(telling)
            else:
                await _settle([telling])
        await workflow.wait_condition(workflow.all_handlers_finished)
        job = session.job
        assert job.ending is not None
        result = JobResult(
            job.name,
            job.phase,
            job.ending.exit_code,
            job.reason,
            job.generation,
            job.incidents,
            job.incidents_archived,
            job,
        )
        if job.phase is Phase.FAILED:
            # Shown red in the web UI's list, with the reason; the details carry the result.
            raise ApplicationError(job.reason, result, type="JobFailed", non_retryable=True)
        return result

    def _continues_as_new(self) -> bool:
        """Return whether the workflow is to continue as new, and may.

        It is when the server suggests it, because of the length of the history, and when a newer
        build of relaunch is to work for it. It may where everything only waits: an order to nodes
        is never left half-done.
        """
        info = workflow.info()
        if not (info.is_continue_as_new_suggested() or is_build_outdated(info)):
            return False
        tasks = self._session.tasks
        if any(not tasks.can_pause(task) for task in tasks.busy):
            return False
        return self._session.job.ending is None or self._actions.is_under_way

    async def _continue_as_new(self) -> None:
        session = self._session
        tasks = [*self._actions.pause(), *self._watches.running]
        for watch in self._watches.running:
            watch.cancel()
        while True:
            if (cancelled := await _settle(tasks)) is not None:
                # The next run takes it and stops the ranks.
                self._take_order("cancel", cancelled, None)
            # Signals may have started tasks since, such as a claim, of which the next run would
            # know nothing.
            tasks = [one for one in session.tasks.busy if not session.tasks.can_pause(one)]
            if not tasks:
                break
        self._take_new_kinds()
        carried = CarriedState(
            tuple(session.inbox),
            self._watches.after_seq,
            self._watches.exited,
            self._actions.dead,
            self._deadline.at,
            self._notices.last,
            self._claims.carried,
            self._actions.carried,
            self._orders.carried,
            self._notices.carried,
        )
        job = session.job
        continue_as_new(
            TrainingJobInput(
                spec=job.spec,
                policy=job.policy,
                resume=job,
                carried=carried,
                hides_causes=self._hides_causes,
            ),
            memo(job),
        )

    def _take_new_kinds(self) -> None:
        """Take the events out of the inbox that 0.1.0 did not have, which change the state only.

        A run of release 0.1.0 may continue this one, and could not read an inbox with them.
        """
        session = self._session
        for event in session.inbox:
            if isinstance(event, NEW_KINDS):
                session.job, _ = step(session.job, event, workflow.now())
        session.inbox = [one for one in session.inbox if not isinstance(one, NEW_KINDS)]


def _first_state(start: TrainingJobInput) -> JobState:
    """Return the state with which a run begins: a new submission, or that of the run before."""
    if (resume := start.resume) is not None:
        # 0.1.0 did not record that it has run.
        return replace(resume, has_run=resume.has_run or resume.launched_at is not None)
    # Without a worker the first task may come hours later.
    info, now = workflow.info(), workflow.info().workflow_start_time
    submission = int(now.timestamp() * 1000)
    if start.previous is None:
        return JobState(
            namespace=info.namespace,
            name=start.spec.name,
            submission=submission,
            spec=start.spec,
            policy=start.policy,
            submitted_by=start.submitted_by,
            submitted_at=now,
        )
    job = resubmit(
        start.previous,
        max(submission, start.previous.submission + 1),
        start.submitted_by,
        now,
        start.renew_budgets,
        start.avoid_nodes,
    )
    if (slow := start.previous.slow_nodes) and not workflow.patched(SLOW_PATCH):
        job = replace(job, slow_nodes=slow)
    return replace(job, spec=start.spec, policy=start.policy)


def _sign(start: TrainingJobInput) -> ClaimsCarried:
    """Return the first claims of a submission, with what its caller has signed."""
    info = workflow.info()
    proof = None if start.proof is None else start.proof.model_dump(mode="json")
    message = {**start.describe_submission(), "proof": proof}
    signed = read_signed(info.namespace, info.workflow_id, info.workflow_type, message)
    return ClaimsCarried(signed=signed)


def _ends_growth(event: Event, decision: Decision) -> bool:
    """Return whether the job does something else than to take the nodes that it asked for."""
    if isinstance(decision, Relaunch) and decision.strategy is Strategy.GROW:
        return False
    return not isinstance(decision, Ignore | Wait) or isinstance(event, NodesGranted)


def _cancel_request(error: asyncio.CancelledError) -> CancelRequested:
    """Return the cancel of the workflow as a cancel of the job: its ranks are stopped before it
    ends."""
    return CancelRequested(
        reason=workflow.cancellation_reason() or str(error) or "the workflow was cancelled", by=""
    )


async def _settle(tasks: list[asyncio.Task[None]]) -> CancelRequested | None:
    """Wait until the tasks and all handlers are done, despite cancels; return a cancel that came in
    that time."""
    cancelled = None
    while True:
        try:
            await workflow.wait_condition(
                lambda: all(task.done() for task in tasks) and workflow.all_handlers_finished()
            )
        except asyncio.CancelledError as error:
            cancelled = _cancel_request(error)
        else:
            return cancelled
