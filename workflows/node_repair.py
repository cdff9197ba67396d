"""One repair of one node, durably: carries out the steps that `recovery.repair` chooses, and tells whoever waits how it ended.

An order that acts on the node is never given twice because an answer got lost: the node is looked at first. A cancel is obeyed until
such an order was given; from then on the repair goes on to its end, because somebody has to know what became of the node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from datetime import datetime, timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError

with workflow.unsafe.imports_passed_through():
    from pydantic import ValidationError

    from activities.node import DIAGNOSE_WITHIN, NodeActivities, NodeInput, NodeTerms, RepairOrder
    from recovery.catalog import catalog
    from recovery.repair import begin, learn, next_step
    from recovery.repair_state import (
        Answered,
        AskPerson,
        CancelAsked,
        DeadlinePassed,
        Diagnose,
        Fact,
        Finish,
        LookAgain,
        NoAnswer,
        Probe,
        Reboot,
        RepairRules,
        RepairState,
        ResetGpus,
        Slept,
        Step,
    )
    from workflows.messages import AnswerMessage, NodeRepairInput, NodeRepairResult, explain
    from workflows.orders import BEAT, KEEP_TRYING
    from workflows.search_attributes import NODES, STRATEGY, repair_details

REBOOT_WITHIN = timedelta(minutes=1)
"""For the node to take the order; what it comes to is seen afterwards."""
ONCE = RetryPolicy(maximum_attempts=1)
"""For orders that act on the node: whoever lost the answer looks at the node before anything is ordered again."""

Result = TypeVar("Result")


@workflow.defn
class NodeRepair:
    @workflow.init
    def __init__(self, start: NodeRepairInput) -> None:
        self._start = start
        self._catalog = catalog(start.catalog)
        self._told: list[Fact] = []
        self._state: RepairState | None = None
        self._step: Step | None = None

    @workflow.run
    async def run(self, start: NodeRepairInput) -> NodeRepairResult:
        workflow.upsert_search_attributes([NODES.value_set([start.node]), STRATEGY.value_set(start.strategy.value)])
        terms = await self._carried_out(self._read_terms())
        if terms.unknown:
            return NodeRepairResult(start.node, "refused", terms.unknown)
        self._state = begin(
            id=f"{workflow.info().workflow_id}/{workflow.info().run_id}",
            fleet=start.fleet,
            node=start.node,
            strategy=start.strategy,
            gpus=start.gpus,
            because=start.because,
            by=start.by,
            rules=RepairRules(
                mode=terms.repairs,
                level=start.level,
                expected_gpus=terms.gpus,
                examine_within=DIAGNOSE_WITHIN.get(start.level, timedelta(0)),
                answer_within=start.answer_within,
            ),
            deadline=start.deadline,
            now=workflow.now(),
            approved_by=start.approved_by,
        )
        while True:
            self._learn()
            step = self._step = next_step(self._state, workflow.now())
            workflow.logger.info("%s: %s", step.kind, step.because)
            workflow.set_current_details(repair_details(self._state, step))
            if isinstance(step, Finish):
                return NodeRepairResult(start.node, step.outcome, step.because, step.verdict)
            self._told.append(await self._carried_out(self._carry_out(step)))

    def _learn(self) -> None:
        assert self._state is not None
        while self._told:
            self._state = learn(self._state, self._told.pop(0), self._catalog, workflow.now())

    async def _carried_out(self, step: Coroutine[Any, Any, Result]) -> Result:
        """Wait for a step to end, also when the workflow is cancelled: an order that is on its way cannot be taken back."""
        task = asyncio.create_task(step)
        while True:
            try:
                await workflow.wait([task])
            except asyncio.CancelledError as error:
                self._told.append(CancelAsked(workflow.cancellation_reason() or str(error) or "the repair was cancelled"))
            else:
                return task.result()

    async def _carry_out(self, step: Step) -> Fact:
        match step:
            case LookAgain():
                return await self._sleep(step)
            case AskPerson():
                return await self._ask(step)
            case Probe():
                return await self._order("probe", step.within, f"look at {self._start.node}", kernel_since=step.kernel_since)
            case Diagnose():
                return await self._order("diagnose", step.within, f"dcgmi diag -r {step.level} on {self._start.node}", level=step.level)
            case ResetGpus():
                what = ", ".join(step.gpus[:4]) or "all GPUs"
                summary = f"reset {what} of {self._start.node}"
                return await self._order("reset-gpus", step.within, summary, boot_id=step.boot_id, gpus=step.gpus)
            case Reboot():
                why = step.because
                return await self._order("reboot", REBOOT_WITHIN, f"reboot {self._start.node}", boot_id=step.boot_id, because=why)
            case _:
                raise ValueError(f"{step} is not carried out")

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
        because: str = "",
        kernel_since: timedelta | None = None,
    ) -> Fact:
        assert self._state is not None
        acts = verb in ("reset-gpus", "reboot")
        order = RepairOrder(self._start.fleet, self._start.node, self._state.id, verb, within, boot_id, gpus, level, because, kernel_since)
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
            return NoAnswer(f"the order to {verb} was on its way when its worker died ({error.cause or error})")

    # --- waiting

    async def _sleep(self, step: LookAgain) -> Fact:
        await self._until(workflow.now() + step.after, step.because)
        return Slept()

    async def _ask(self, step: AskPerson) -> Fact:
        if (job := workflow.info().parent) is not None:
            handle = workflow.get_external_workflow_handle(job.workflow_id)
            answer = f"`starter.py answer {self._start.job} approve` or `deny`" if self._start.job else "the update `answer`"
            question = f"may {self._start.node} be treated with {self._start.strategy}? {answer}; without an answer it is not done"
            message = {"node": self._start.node, "question": question, "until": step.until.isoformat()}
            try:
                await handle.signal("repair_asks", message)
            except ApplicationError as error:  # it has ended; whoever looks at this page is asked all the same
                workflow.logger.info("%s could not be told: %s", job.workflow_id, error)
        if await self._until(step.until, f"without an answer: no {self._start.strategy} of {self._start.node}"):
            return Slept()
        return DeadlinePassed()

    async def _until(self, at: datetime, summary: str) -> bool:
        """Wait until then; return whether somebody said something before."""
        wait = max(timedelta(0), at - workflow.now())
        try:
            await workflow.wait_condition(lambda: bool(self._told), timeout=wait, timeout_summary=summary[:200])
        except TimeoutError:
            return False
        return True

    # --- what people send

    @workflow.update(description='Answer what this repair asks: {"decision": "approve" | "deny", "because": "…", "by": "…"}.')
    async def answer(self, message: Any = None, *_more: Any) -> str:
        answered = AnswerMessage.model_validate(message)
        self._told.append(Answered(answered.decision == "approve", answered.by, answered.because))
        return "approved" if answered.decision == "approve" else "denied"

    @answer.validator
    def _check_answer(self, message: Any = None, *_more: Any) -> None:
        try:
            answered = AnswerMessage.model_validate({} if message in (None, "") else message)
        except ValidationError as error:
            raise ApplicationError(explain(error), type="BadInput", non_retryable=True) from None
        if not answered.decision:
            raise ApplicationError("decision: missing, expected approve or deny", type="BadInput", non_retryable=True)
        if not isinstance(self._step, AskPerson):
            raise ApplicationError(f"nothing is asked: {self._what()}", type="BadInput", non_retryable=True)

    @workflow.query(description="Everything this repair knows.")
    def state(self) -> RepairState | None:
        return self._state

    @workflow.query(description="What this repair does now.")
    def next(self) -> str:
        return self._what()

    def _what(self) -> str:
        return "the repair begins" if self._step is None else f"{self._step.kind}: {self._step.because}"
