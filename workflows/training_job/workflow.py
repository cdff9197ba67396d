"""Workflow of one submission of a job: takes events from its inbox one by one, decides, and carries
out the decision.

It holds no rank and no connection: what it starts lives on the nodes, and what it waits for
survives any crash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from relaunch.job.apply import finish, resubmit
    from relaunch.job.claim import more_at
    from relaunch.job.drain import left_out
    from relaunch.job.events import (
        CancelRequested,
        CheckpointSaved,
        DeadlinePassed,
        Event,
        IncidentsArchived,
        LaunchOrdered,
        NodeDeclaredDead,
        NodesAcquired,
        NodesGranted,
        NodesOffered,
        RanksFound,
        Submitted,
    )
    from relaunch.job.fencing import fences, plan_generation, will_fence
    from relaunch.job.ladder import left_with, why_left
    from relaunch.job.places import StartedPlaces
    from relaunch.job.ranks import seat
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
    from relaunch.job.step import step
    from relaunch.messages.jobs import Carried, JobResult, TrainingJobInput
    from relaunch.pool.messages import Place
    from relaunch.spec.policy import Strategy
    from relaunch.workflows.search_attributes import attributes, current_details, memo, updates
    from relaunch.workflows.training_job import commands
    from relaunch.workflows.training_job.claims import Claims
    from relaunch.workflows.training_job.deadline import Deadline
    from relaunch.workflows.training_job.drains import Leaves
    from relaunch.workflows.training_job.handlers import Mailbox
    from relaunch.workflows.training_job.notices import Notices
    from relaunch.workflows.training_job.watches import Watches

KEPT_INCIDENTS = 10
"""Closed incidents kept in the state; beyond that the older half is archived. A state must stay
below 512 KiB."""


def _cancelled(error: asyncio.CancelledError) -> CancelRequested:
    """Return the cancel of the workflow as a cancel of the job: its ranks are stopped before it
    ends."""
    return CancelRequested(
        reason=workflow.cancellation_reason() or str(error) or "the workflow was cancelled", by=""
    )


@workflow.defn
class TrainingJob(Mailbox):
    @workflow.init
    def __init__(self, start: TrainingJobInput) -> None:
        info = workflow.info()
        submission = int(info.workflow_start_time.timestamp() * 1000)
        now = workflow.now()
        self._inbox: list[Event] = list(start.carried.inbox)
        self._act: asyncio.Task[None] | None = None
        self._leaving: list[asyncio.Task[None]] = []
        self._launching = False
        """A launch may have started ranks that `maybe_alive` does not yet include."""
        self._relaunching: Relaunch | None = None
        """The relaunch that was decided on and has not ended."""
        self._launched_generation = 0
        self._sent: dict[str, str] = {}
        """Places of the nodes that got the order to start, as `commands.launch` fills it in."""
        self._watches = Watches(
            lambda: self._job, self._inbox.append, start.carried.after_seq, start.carried.exited
        )
        self._dead: tuple[str, ...] = start.carried.dead
        self._archiving: asyncio.Task[None] | None = None
        self._claims = Claims(lambda: self._job, self._inbox.append, start.carried.claims)
        self._saying_again: asyncio.Task[None] | None = None
        self._growing: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._notices = Notices(lambda: self._job, start.carried.told)
        self._leaves = Leaves(lambda: self._job, self._inbox.append)
        self._deadline = Deadline(
            lambda: self._job.next.what, lambda until: self._inbox.append(DeadlinePassed(until))
        )
        self._attributes: dict[str, object] = {}
        self._memo: dict[str, object] = {}
        if start.resume is not None:
            self._job = start.resume
            self._attributes, self._memo = attributes(self._job), memo(self._job)
            return
        if start.previous is not None:
            submission = max(submission, start.previous.submission + 1)
            self._job = resubmit(
                start.previous,
                submission,
                start.submitted_by,
                now,
                start.renew_budgets,
                start.avoid_nodes,
            )
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
        self._inbox.append(Submitted(start.reason, start.submitted_by))

    @workflow.run
    async def run(self, start: TrainingJobInput) -> JobResult:
        if start.resume is not None:
            self._watches.keep()
            self._deadline.set(start.carried.deadline)
            self._leaves.keep()
        while True:
            try:
                await workflow.wait_condition(
                    lambda: bool(self._inbox) or self._may_end() or self._broken() is not None
                )
            except asyncio.CancelledError as error:
                self._inbox.append(_cancelled(error))
            if (broken := self._broken()) is not None:
                # A bug. It fails the workflow task, not the workflow: the server shows it and
                # retries until it is fixed.
                raise RuntimeError(f"nobody expected this of an activity: {broken}") from broken
            while self._inbox:
                self._take(self._inbox.pop(0))
            self._leaves.keep()
            self._watches.report_checkpoints()
            self._keep_wish()
            self._report_faults()
            self._publish()
            self._notices.keep()
            if self._may_end():
                return await self._end()
            if workflow.info().is_continue_as_new_suggested() and self._may_continue_as_new():
                await self._continue_as_new()

    def _broken(self) -> BaseException | None:
        """Return the unexpected error of a task; if ignored, the job would stall without showing
        why."""
        all_of_them = (*self._doing, *self._watches.tasks, *self._leaves.tasks)
        tasks = [task for task in all_of_them if task is not None and task.done()]
        return next(
            (
                error
                for task in tasks
                if not task.cancelled() and (error := task.exception()) is not None
            ),
            None,
        )

    @property
    def _doing(self) -> tuple[asyncio.Task[None] | None, ...]:
        return (
            self._act,
            self._archiving,
            self._saying_again,
            self._growing,
            self._reporting,
            self._watches.exchanging,
            self._notices.telling,
        )

    # --- one event, one decision

    def _take(self, event: Event) -> None:
        now = workflow.now()
        waited_for = self._job.maybe_alive
        self._job, decision = step(self._job, event, now)
        match event:
            case NodesAcquired():
                self._dead = tuple(
                    node for node in self._dead if node not in {slot.node for slot in event.slots}
                )
            case NodeDeclaredDead():
                self._dead = tuple(dict.fromkeys((*self._dead, event.node)))
                if (ending := self._job.ending) is not None:
                    self._replace_act(
                        lambda: self._stop(once=ending.phase is Phase.SUCCEEDED)
                    )  # stop without that node
                elif (
                    isinstance(decision, Ignore)
                    and event.node in waited_for
                    and self._relaunching is not None
                ):
                    # The node is of an earlier submission: its ranks are stopped before the launch,
                    # which then continues.
                    relaunching = self._relaunching
                    self._replace_act(lambda: self._relaunch(relaunching))
        if not isinstance(decision, Ignore):
            workflow.logger.info(
                "%s -> %s: %s",
                event.kind,
                decision.kind,
                decision.reason,
                extra={"generation": self._job.generation},
            )
        if not isinstance(decision, Ignore | Wait) or isinstance(event, NodesGranted):
            self._stop_asking_for_more(decision)
        self._carry_out(decision)
        if (
            isinstance(event, NodesOffered)
            and isinstance(decision, Wait)
            and not self._claims.is_asking_for_more
        ):
            self._growing = asyncio.create_task(self._claims.ask_for_more(self._job.generation))
        if isinstance(event, CheckpointSaved) and isinstance(decision, Ignore):
            self._watches.keep()  # the watch that saw the checkpoint has ended
        if len(self._job.incidents) > KEPT_INCIDENTS and self._archiving is None:
            self._archiving = asyncio.create_task(self._archive())

    def _carry_out(self, decision: Decision) -> None:
        if not isinstance(decision, Ignore | Wait):
            self._relaunching = None
        match decision:
            case Relaunch():
                self._relaunching = decision
                self._deadline.set(None)
                self._watches.stop()
                self._replace_act(lambda: self._relaunch(decision))
            case Stop():
                self._deadline.set(None)
                self._watches.stop()
                self._replace_act(lambda: self._stop(once=decision.phase is Phase.SUCCEEDED))
            case Examine() | Repair():
                self._deadline.set(decision.until)
                self._watches.stop()
                self._replace_act(lambda: self._look_after(decision))
            case Ask():
                self._deadline.set(self._job.next.at)
                if self._job.lost:
                    self._watches.keep()  # a node that comes back answers the question by itself
                else:
                    self._watches.stop()
                    self._replace_act(self._let_go)
            case Wait():
                self._deadline.set(decision.until)
                if decision.phase in (Phase.RUNNING, Phase.NODE_LOST):
                    self._watches.keep()
            case Ignore():
                if self._act is None:
                    self._watches.keep()

    def _replace_act(self, act: Callable[[], Awaitable[None]]) -> None:
        if self._act is not None:
            self._act.cancel()
            self._leaving.append(self._act)
        self._leaving = [one for one in self._leaving if not one.done()]
        leaving = tuple(self._leaving)

        async def carry_out() -> None:
            if leaving:
                await workflow.wait(
                    leaving
                )  # their orders must be released before anything else is ordered
            await self._find_half_launched()
            try:
                await act()
            except ActivityError as error:
                if is_cancelled_exception(error):
                    return
                raise

        self._act = asyncio.create_task(carry_out())

    # --- launching

    async def _find_half_launched(self) -> None:
        """After an aborted launch, report the nodes on which its ranks may have been started."""
        if self._launching:
            found = RanksFound(
                tuple(slot.node for slot in self._job.slots if slot.node not in self._dead),
                places=(
                    StartedPlaces(
                        self._job.submission, self._launched_generation, dict(self._sent)
                    ),
                ),
            )
            self._inbox.append(found)
            await workflow.wait_condition(lambda: found not in self._inbox)
            self._launching = False

    async def _relaunch(self, decision: Relaunch) -> None:
        def superseded() -> bool:
            return decision.generation != self._job.generation or self._job.ending is not None

        if decision.delay:
            await workflow.sleep(
                decision.delay.total_seconds(),
                summary=f"delay before generation {decision.generation}",
            )
        leaving = left_out(self._job, workflow.now())
        excluded = tuple(
            dict.fromkeys(
                (*decision.without, *leaving, *(avoided.node for avoided in self._job.avoided))
            )
        )
        places = tuple(Place(slot.node, slot.address, slot.gpus) for slot in self._job.slots)
        is_ours = (
            bool(places)
            and not self._claims.waits
            and {place.node for place in places} == set(self._claims.nodes)
        )
        fewer, left = self._job.fewer, left_with(self._job, excluded)
        has_them = not self._claims.waits and {slot.node for slot in left} <= set(
            self._claims.nodes
        )
        shrinks = (
            decision.strategy is Strategy.SHRINK
            and has_them
            and len(left) >= self._job.spec.fewest_nodes
        )
        if decision.strategy is Strategy.GROW and self._claims.is_asking_for_more:
            places, fewer = self._claims.take_more(), self._claims.fewer
        elif shrinks:
            places, fewer = self._claims.leave(left), why_left(self._job, left)
        elif not (decision.keep_nodes and is_ours) or any(
            place.node in excluded for place in places
        ):
            places = await self._claims.acquire(decision, excluded)
            if not places or superseded():
                return
            fewer = self._claims.fewer
        slots = seat(self._job.slots, places, anew=not decision.keep_nodes)
        left_behind = [
            node for node in self._job.maybe_alive if node not in {place.node for place in places}
        ]
        # Ranks launched without fencing (such as those of a single node) never fence themselves,
        # but as part of a fencing gang they would be taken for ranks that do.
        alone = (
            bool(self._job.maybe_alive)
            and not fences(self._job)
            and will_fence(self._job, len(slots))
        )
        if left_behind or alone:
            # Stop ranks on all nodes, not only on those: a node that was cut off stops its ranks
            # only when no other node vouches for it.
            before = decision.generation - 1
            gone = await commands.prove_stopped(
                self._job,
                before,
                self._job.maybe_alive,
                f"stop generation {before} before another starts",
            )
            self._inbox.append(gone)
            if superseded():
                return
        self._inbox.append(NodesAcquired(slots, fewer))
        if left_behind or shrinks:
            await workflow.wait_condition(lambda: self._job.slots == slots)
            await self._claims.say_what_is_left()
        token = replace(self._job.token, generation=decision.generation)
        nodes = tuple(slot.node for slot in slots)
        while self._claims.must_tell_times(plan_generation(self._job, decision.generation, nodes)):
            # The policy has changed: a later submission must not judge the ranks by shorter
            # timeouts.
            await self._claims.say_what_is_left()
            if superseded():
                return
        # From the same state as the orders: a later change of the policy applies to the next
        # launch.
        launch = plan_generation(self._job, decision.generation, nodes)
        self._inbox.append(LaunchOrdered(decision.generation, launch))
        self._launching, self._launched_generation, self._sent = True, decision.generation, {}
        self._inbox.append(await commands.launch(self._job, token, slots, self._sent))
        self._launching = False
        self._relaunching = None

    async def _let_go(self) -> None:
        """Stop the ranks while a person is asked, which may take long, and withdraw a claim that
        waits."""
        await self._stop(once=True)
        if self._claims.waits:
            await self._claims.give_back()

    # --- more nodes

    def _keep_wish(self) -> None:
        """Inform the fleet when the job would take more nodes, if that has changed."""
        job, said = self._job, self._saying_again
        if (
            not job.spec.is_elastic
            or job.phase is not Phase.RUNNING
            or job.leaving
            or job.incident is not None
        ):
            return
        busy = (
            self._claims.waits
            or self._claims.is_asking_for_more
            or (said is not None and not said.done())
        )
        if not busy and more_at(job) != self._claims.more_at:
            self._saying_again = asyncio.create_task(self._claims.resend())

    def _stop_asking_for_more(self, decision: Decision) -> None:
        """Withdraw a request for more nodes unless the job grows with it: the fleet may grant them
        to others."""
        if not self._claims.is_asking_for_more or (
            isinstance(decision, Relaunch) and decision.strategy is Strategy.GROW
        ):
            return
        self._claims.forget_more()
        self._saying_again = asyncio.create_task(self._claims.resend())

    def _report_faults(self) -> None:
        """Report new suspects to the fleet at once: a job that restarts in place, or waits, sends
        no claim that would."""
        reporting = self._reporting is not None and not self._reporting.done()
        if not reporting and self._job.ending is None and self._claims.has_faults_to_report:
            # The task starts after the current decision, which may send a claim.
            self._reporting = asyncio.create_task(self._claims.report_faults())

    # --- examinations and repairs

    async def _look_after(self, decision: Examine | Repair) -> None:
        """Free the GPUs, which an examination and a repair both need, then order it."""
        generation = self._job.generation
        if self._job.maybe_alive:
            what = "examining" if isinstance(decision, Examine) else decision.strategy
            gone = await commands.prove_stopped(
                self._job,
                generation,
                self._job.maybe_alive,
                f"stop generation {generation} before {what}",
            )
            self._inbox.append(gone)
        if isinstance(decision, Examine):
            self._inbox.append(await commands.examine(self._job, decision))
        else:
            self._inbox.append(await commands.repair(self._job, decision))

    # --- stopping

    async def _stop(self, *, once: bool) -> None:
        generation, alive = self._job.generation, self._job.maybe_alive
        places = tuple(slot.node for slot in self._job.slots if slot.node not in self._dead)
        if once:
            alive, places = (), tuple(dict.fromkeys((*alive, *places)))
        if alive:
            self._inbox.append(
                await commands.prove_stopped(
                    self._job, generation, alive, f"stop generation {generation}"
                )
            )
        if rest := tuple(node for node in places if node not in alive):
            # Proven gone earlier; one of these nodes may be dead, so do not wait for it.
            self._inbox.append(
                await commands.prove_stopped(
                    self._job,
                    generation,
                    rest,
                    f"clean up after generation {generation}",
                    once=True,
                )
            )

    # --- end and continue-as-new

    def _may_end(self) -> bool:
        return (
            self._job.ending is not None
            and not self._inbox
            and self._act is not None
            and self._act.done()
        )

    async def _end(self) -> JobResult:
        if self._act is not None:
            await self._act  # raises the task's error
        if self._archiving is not None:
            await self._settled([self._archiving])  # a cancel changes nothing any more
        await self._settled([asyncio.create_task(self._claims.give_back())])
        assert self._job.ending is not None
        self._job = finish(self._job, workflow.now())
        self._publish()
        self._notices.keep()
        if self._notices.telling is not None:
            await self._settled([self._notices.telling])
        await workflow.wait_condition(workflow.all_handlers_finished)
        job, ending = self._job, self._job.ending
        assert ending is not None
        result = JobResult(
            job.name,
            job.phase,
            ending.exit_code,
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

    def _may_continue_as_new(self) -> bool:
        """Return whether only watching goes on: an order to nodes is never left half-done."""
        busy = [task for task in self._doing if task is not None and not task.done()]
        return not busy and self._job.ending is None

    async def _continue_as_new(self) -> None:
        watching = self._watches.running
        for watch in watching:
            watch.cancel()
        while True:
            if (cancelled := await self._settled(watching)) is not None:
                self._inbox.append(cancelled)  # the next run takes it and stops the ranks
            # Signals may have started tasks meanwhile, such as a claim, of which the next run would
            # know nothing.
            watching = [task for task in self._doing if task is not None and not task.done()]
            if not watching:
                break
        carried = Carried(
            tuple(self._inbox),
            self._watches.after_seq,
            self._watches.exited,
            self._dead,
            self._deadline.at,
            self._notices.told,
            self._claims.carried,
        )
        workflow.continue_as_new(
            TrainingJobInput(
                spec=self._job.spec, policy=self._job.policy, resume=self._job, carried=carried
            )
        )

    async def _settled(self, tasks: list[asyncio.Task[None]]) -> CancelRequested | None:
        """Wait until the tasks and all handlers are done, despite cancels; return a cancel that
        came meanwhile."""
        cancelled = None
        while True:
            try:
                await workflow.wait_condition(
                    lambda: all(task.done() for task in tasks) and workflow.all_handlers_finished()
                )
            except asyncio.CancelledError as error:
                cancelled = _cancelled(error)
            else:
                return cancelled

    async def _archive(self) -> None:
        incidents = self._job.incidents[: KEPT_INCIDENTS // 2]
        await commands.archive(self._job, incidents)
        self._archiving = None
        self._inbox.append(IncidentsArchived(len(incidents)))

    # --- the job's page

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

    @workflow.signal(
        description="The fleet was begun anew and asks what this job has. Nobody else sends it."
    )
    def claim_again(self, *_more: Any) -> None:
        self._saying_again = asyncio.create_task(self._claims.resend())
