"""Workflow of one repair of one node.

It carries out the steps that `relaunch.repair.machine` chooses, and reports the end to the fleet
and to a waiting job. An order that acts on the node is given only with a permit of the fleet, and
never again because an answer got lost: the node is probed first. A cancel is obeyed until such an
order was given; after that the repair goes on to its end, because the state of the node must be
known. If no strategy is ordered, `relaunch.repair.treatment` chooses one by what an examination
finds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Literal, TypeVar, assert_never

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from pydantic import ValidationError

    from relaunch.activities.examine import (
        DIAGNOSE_WITHIN,
        NodeActivities,
        NodeInput,
        NodeTerms,
        RepairOrder,
    )
    from relaunch.evidence.catalog import catalog
    from relaunch.evidence.findings import Verdict
    from relaunch.evidence.health import Health
    from relaunch.messages.jobs import AnswerMessage, NodeRepairInput, NodeRepairResult, explain
    from relaunch.messages.nodes import ExamineNodesInput
    from relaunch.pool.events import RepairResult, RepairStart
    from relaunch.repair.explain import order_of
    from relaunch.repair.guard import restarts
    from relaunch.repair.machine import begin, learn, next_step
    from relaunch.repair.state import (
        Answered,
        AskPerson,
        CancelAsked,
        DeadlinePassed,
        Diagnose,
        Fact,
        Finish,
        LookAgain,
        NoAnswer,
        PowerCycle,
        Probe,
        Reboot,
        RepairRules,
        RepairState,
        ResetGpus,
        Slept,
        Step,
    )
    from relaunch.repair.treatment import (
        Course,
        Examine,
        Treat,
        Treatment,
        examined,
        next_treatment,
        treated,
    )
    from relaunch.spec.policy import Strategy
    from relaunch.workflows.node_repair.permits import LAST_WORD, Permits
    from relaunch.workflows.search_attributes import NODES, STRATEGY, course_details, repair_details
    from relaunch.workflows.training_job.commands import BEAT, DETACH, KEEP_TRYING

TREATMENT_WITHIN = timedelta(minutes=45)
"""For a reset or a reboot that an examination calls for, with the examination that proves it: a
reboot takes up to 25 minutes, DCGM 15."""
REBOOT_WITHIN = timedelta(minutes=1)
"""For the node to take the order; whether it was carried out is probed afterwards."""
PROBING = timedelta(seconds=90)
"""The time of an examination besides DCGM: three probes of twenty seconds, and what is between
them."""
ONCE = RetryPolicy(maximum_attempts=1)
"""For orders that act on the node: if the answer is lost, the node is probed before anything is
ordered again."""

Result = TypeVar("Result")


@workflow.defn
class NodeRepair:
    @workflow.init
    def __init__(self, start: NodeRepairInput) -> None:
        self._start = start
        self._catalog = catalog(start.catalog)
        self._told: list[Fact] = []
        self._fleet = Permits(start.fleet, start.node)
        self._terms = NodeTerms("observe", 0)
        self._course: Course | None = None
        self._state: RepairState | None = None
        self._step: Step | Treatment | None = None

    @workflow.run
    async def run(self, start: NodeRepairInput) -> NodeRepairResult:
        workflow.upsert_search_attributes([NODES.value_set([start.node])])
        self._terms = await self._carried_out(self._read_terms())
        unknown = self._terms.unknown
        if not unknown and start.power and not self._terms.power:
            unknown = f"the power of {start.node} cannot be cycled: the file of fleet {start.fleet} gives it no power: {{cycle: [COMMAND, …]}}"
        if unknown:
            return await self._ended(Finish("refused", Verdict.UNKNOWN, unknown))
        info = workflow.info()
        began = RepairStart(start.node, info.workflow_id, info.run_id, start.by, start.reason)
        await self._carried_out(self._fleet.tell("repair_began", began))
        try:
            if start.strategy is None:
                course = Course(
                    start.node,
                    start.reason,
                    power=self._terms.power,
                    after_reboot=start.after_reboot,
                )
                end = await self._treated(course)
            else:
                end = await self._repaired(
                    start.strategy, start.gpus, start.reason, power=start.power
                )
        except BaseException as error:
            if workflow.is_failure_exception(error):
                await self._ended(
                    Finish("ambiguous", Verdict.UNKNOWN, f"the repair failed: {error}")
                )
            raise
        return await self._ended(end)

    async def _ended(self, end: Finish) -> NodeRepairResult:
        start, info = self._start, workflow.info()
        ended = RepairResult(
            start.node,
            info.workflow_id,
            info.run_id,
            start.by,
            start.job,
            end.outcome,
            end.verdict,
            end.reason,
        )
        await self._carried_out(self._fleet.tell("repair_ended", ended, LAST_WORD))
        return NodeRepairResult(start.node, end.outcome, end.reason, end.verdict)

    async def _treated(self, course: Course) -> Finish:
        """Examine the node and treat it, until it is healthy or nothing is left to do."""
        while True:
            cancels = [fact for fact in self._told if isinstance(fact, CancelAsked)]
            self._told.clear()
            if cancels and not course.cancelled:
                course = replace(course, cancelled=cancels[0].reason)
            self._course = course
            step = self._step = next_treatment(course, self._start.deadline - workflow.now())
            workflow.logger.info("%s: %s", step.kind, step.reason)
            workflow.set_current_details(
                course_details(course, step, self._start.by, self._start.deadline)
            )
            match step:
                case Finish():
                    return step
                case Examine():
                    # Once something was done to the node, its state must be known; before that an
                    # examination may be cancelled.
                    health = await self._carried_out(
                        self._examined(course, step), stops=not course.acted
                    )
                    if health is not None:
                        course = examined(course, health, workflow.now())
                case Treat():
                    end = await self._repaired(
                        step.strategy, step.gpus, step.reason, power=step.power
                    )
                    assert self._state is not None
                    course = treated(course, self._state, end, workflow.now())
                case _:
                    assert_never(step)

    async def _repaired(
        self, strategy: Strategy, gpus: tuple[str, ...], reason: str, *, power: bool = False
    ) -> Finish:
        """Carry out one strategy, from the first probe to the examination that proves it."""
        start = self._start
        last = self._state.health if self._state is not None else None
        workflow.upsert_search_attributes([STRATEGY.value_set(strategy.value)])
        self._state = begin(
            id=self._id(),
            fleet=start.fleet,
            node=start.node,
            strategy=strategy,
            gpus=gpus,
            reason=reason,
            by=start.by,
            rules=RepairRules(
                mode=self._terms.repairs,
                level=start.level,
                expected_gpus=self._terms.gpus,
                examine_within=DIAGNOSE_WITHIN.get(start.level, timedelta(0)),
                answer_within=start.answer_within,
                power=self._terms.power,
                waited_for=bool(start.job),
            ),
            # One strategy must not use up the time of all: a node that never comes back from a
            # reboot would leave no time for the others.
            deadline=start.deadline
            if start.strategy
            else min(start.deadline, workflow.now() + TREATMENT_WITHIN),
            now=workflow.now(),
            approved_by=start.approved_by,
            power=power,
            boot_id=last.boot_id if power and last is not None else "",
        )
        while True:
            self._learn()
            step = self._step = next_step(self._state, workflow.now())
            workflow.logger.info("%s: %s", step.kind, step.reason)
            self._show()
            if isinstance(step, Finish):
                return await self._said_by_fleet(step)
            self._told.append(await self._carried_out(self._carry_out(step)))

    async def _said_by_fleet(self, end: Finish) -> Finish:
        """Add to the refusal of a job's repair why the fleet does not permit it.

        Of a shared node, the fleet knows which jobs have to leave first and by when; the node
        itself only reports that it is in use.
        """
        state, job = self._state, self._start.job
        assert state is not None
        if (
            not job
            or end.outcome != "refused"
            or state.attempts
            or state.health is None
            or not state.health.busy
        ):
            return end
        why = await self._carried_out(
            self._fleet.why_not(state.reason, lambda: bool(self._told), self._show, job)
        )
        return replace(end, reason=f"{end.reason}; {why}") if why else end

    def _show(self) -> None:
        assert self._state is not None
        assert self._step is not None
        assert not isinstance(self._step, Examine | Treat)
        workflow.set_current_details(
            repair_details(self._state, self._step, self._course, self._fleet.waits)
        )

    @staticmethod
    def _id() -> str:
        return f"{workflow.info().workflow_id}/{workflow.info().run_id}"

    def _learn(self) -> None:
        assert self._state is not None
        while self._told:
            self._state = learn(self._state, self._told.pop(0), self._catalog, workflow.now())

    async def _carried_out(
        self, step: Coroutine[Any, Any, Result], *, stops: bool = False
    ) -> Result:
        """Wait for a step to end, even if the workflow is cancelled: an order under way cannot be
        taken back.

        With `stops` the step is cancelled, too.
        """
        task = asyncio.create_task(step)
        while True:
            try:
                await workflow.wait([task])
            except asyncio.CancelledError as error:
                self._told.append(
                    CancelAsked(
                        workflow.cancellation_reason() or str(error) or "the repair was cancelled"
                    )
                )
                if stops:
                    task.cancel()
            else:
                return task.result()

    async def _carry_out(self, step: Step) -> Fact:
        match step:
            case LookAgain():
                return await self._sleep(step)
            case AskPerson():
                return await self._ask(step)
            case Probe():
                return await self._order(
                    "probe",
                    step.within,
                    f"look at {self._start.node}",
                    kernel_since=step.kernel_since,
                )
            case Diagnose():
                return await self._order(
                    "diagnose",
                    step.within,
                    f"dcgmi diag -r {step.level} on {self._start.node}",
                    level=step.level,
                )
            case ResetGpus() | Reboot() | PowerCycle():
                return await self._fleet_lets(step) or await self._act(step)
            case _:
                raise ValueError(f"{step} is not carried out")

    async def _fleet_lets(self, step: ResetGpus | Reboot | PowerCycle) -> Fact | None:
        """Ask the fleet for a permit; return None if the step may be carried out now."""
        assert self._state is not None
        kind: Literal["reset", "reboot"] = "reset" if isinstance(step, ResetGpus) else "reboot"
        return await self._fleet.ask(
            kind,
            order_of(self._state),
            step.reason,
            self._state.deadline,
            lambda: bool(self._told),
            self._show,
            power=isinstance(step, PowerCycle),
            restarts=restarts(self._state, workflow.now()),
            job=self._start.job,
        )

    async def _act(self, step: ResetGpus | Reboot | PowerCycle) -> Fact:
        match step:
            case ResetGpus():
                what = ", ".join(step.gpus[:4]) or "all GPUs"
                summary = f"reset {what} of {self._start.node}"
                return await self._order(
                    "reset-gpus", step.within, summary, boot_id=step.boot_id, gpus=step.gpus
                )
            case Reboot():
                why = step.reason
                return await self._order(
                    "reboot",
                    REBOOT_WITHIN,
                    f"reboot {self._start.node}",
                    boot_id=step.boot_id,
                    reason=why,
                )
            case PowerCycle():
                return await self._order(
                    "power-cycle", step.within, f"cycle the power of {self._start.node}"
                )
            case _:
                assert_never(step)

    async def _examined(self, course: Course, step: Examine) -> Health | None:
        """Examine the node as `nodes check` does; return None if it was cancelled before there was
        a result."""
        start = self._start
        try:
            if step.after and await self._until(workflow.now() + step.after, step.reason):
                return None
            left = max(timedelta(seconds=1), start.deadline - workflow.now())
            within = min(DIAGNOSE_WITHIN.get(start.level, timedelta(0)) + PROBING, left)
            (found,) = await workflow.execute_activity_method(
                NodeActivities.check_nodes,
                ExamineNodesInput(
                    fleet=start.fleet,
                    nodes=(start.node,),
                    id=self._id(),
                    level=start.level,
                    within=within,
                    kernel_since=None
                    if course.kernel_from is None
                    else workflow.now() - course.kernel_from,
                    catalog=start.catalog,
                ),
                start_to_close_timeout=within + timedelta(minutes=1),
                schedule_to_close_timeout=left + timedelta(minutes=1),
                heartbeat_timeout=BEAT,
                retry_policy=KEEP_TRYING,
                cancellation_type=DETACH,
                summary=f"examine {start.node}"
                + (f" (dcgmi diag -r {start.level})" if start.level and self._terms.gpus else ""),
            )
        except (ActivityError, asyncio.CancelledError) as error:
            if is_cancelled_exception(error):
                return None
            cause = getattr(error, "cause", None) or error
            return Health(
                Verdict.UNKNOWN, f"the examination of {start.node} came to nothing: {cause}"
            )
        return found.health

    async def _read_terms(self) -> NodeTerms:
        return await workflow.execute_activity_method(
            NodeActivities.read_terms,
            NodeInput(self._start.fleet, self._start.node),
            start_to_close_timeout=timedelta(seconds=10),
            retry_policy=KEEP_TRYING,
            summary=f"what the fleet says about repairing {self._start.node}",
        )

    async def _order(
        self,
        verb: str,
        within: timedelta,
        summary: str,
        *,
        boot_id: str = "",
        gpus: tuple[str, ...] = (),
        level: int = 0,
        reason: str = "",
        kernel_since: timedelta | None = None,
    ) -> Fact:
        assert self._state is not None
        acts = verb in ("reset-gpus", "reboot", "power-cycle")
        order = RepairOrder(
            self._start.fleet,
            self._start.node,
            self._state.id,
            verb,
            within,
            boot_id,
            gpus,
            level,
            reason,
            kernel_since,
        )
        try:
            return await workflow.execute_activity_method(
                NodeActivities.order_repair,
                order,
                start_to_close_timeout=within + timedelta(minutes=1),
                heartbeat_timeout=BEAT,
                retry_policy=ONCE if acts else KEEP_TRYING,
                summary=summary,
            )
        except ActivityError as error:
            if not acts:
                raise
            return NoAnswer(
                f"the order to {verb} was on its way when its worker died ({error.cause or error})"
            )

    # --- waiting

    async def _sleep(self, step: LookAgain) -> Fact:
        await self._until(workflow.now() + step.after, step.reason)
        return Slept()

    async def _ask(self, step: AskPerson) -> Fact:
        assert self._state is not None
        answer = f"`relaunch answer {self._start.job} approve` or `deny`"
        question = f"may {self._start.node} be treated with {self._state.strategy}? {answer}; without an answer it is not done"
        await self._show_question(question, step.until)
        is_answered = await self._until(
            step.until, f"without an answer: no {self._state.strategy} of {self._start.node}"
        )
        await self._show_question("", None)
        return Slept() if is_answered else DeadlinePassed()

    async def _show_question(self, question: str, until: datetime | None) -> None:
        """Have the waiting job show the question on its page; an empty question removes it."""
        if (job := workflow.info().parent) is None or not self._start.job:
            return
        handle = workflow.get_external_workflow_handle(job.workflow_id)
        message = {
            "node": self._start.node,
            "question": question,
            "until": until.isoformat() if until else None,
        }
        try:
            await handle.signal("repair_asks", message)
        except (
            ApplicationError
        ) as error:  # the job has ended; the page of the repair still shows the question
            workflow.logger.info("%s could not be told: %s", job.workflow_id, error)

    async def _until(self, at: datetime, summary: str) -> bool:
        """Wait until then; return whether a message arrived before."""
        wait = max(timedelta(0), at - workflow.now())
        try:
            await workflow.wait_condition(
                lambda: bool(self._told), timeout=wait, timeout_summary=summary[:200]
            )
        except TimeoutError:
            return False
        return True

    # --- messages from people and the fleet

    @workflow.update(
        description='Answer what this repair asks: {"decision": "approve" | "deny", "reason": "…", "by": "…"}.'
    )
    async def answer(self, message: Any = None, *_more: Any) -> str:
        answered = AnswerMessage.model_validate(message)
        self._told.append(Answered(answered.decision == "approve", answered.by, answered.reason))
        return "approved" if answered.decision == "approve" else "denied"

    @answer.validator
    def _check_answer(self, message: Any = None, *_more: Any) -> None:
        try:
            answered = AnswerMessage.model_validate({} if message in (None, "") else message)
        except ValidationError as error:
            raise ApplicationError(explain(error), type="BadInput", non_retryable=True) from None
        if answered.decision not in ("approve", "deny"):
            said = f"decision: {answered.decision or 'missing'}, expected approve or deny"
            raise ApplicationError(said, type="BadInput", non_retryable=True)
        if not isinstance(self._step, AskPerson):
            raise ApplicationError(
                f"nothing is asked: {self._what()}", type="BadInput", non_retryable=True
            )

    @workflow.signal(description="The fleet's answer to what this repair asked of it.")
    def permitted(self, message: Any = None, *_more: Any) -> None:
        self._fleet.hear(message)

    @workflow.query(
        description="Everything this repair knows: of the treatment that is under way, or was the last."
    )
    def state(self) -> RepairState | None:
        return self._state

    @workflow.query(
        description="What was found and done so far, where the examination says what is done."
    )
    def course(self) -> Course | None:
        return self._course

    @workflow.query(description="What this repair does now.")
    def next(self) -> str:
        return self._what()

    def _what(self) -> str:
        if self._step is None:
            return "the repair begins"
        return f"{self._step.kind}: {self._fleet.waits or self._step.reason}"
