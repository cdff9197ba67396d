"""Workflow of one repair of one node.

It carries out the decisions of `relaunch.repair.machine`, and reports the end to the fleet and to a
waiting job. If no strategy is ordered, `relaunch.repair.escalation` chooses one after the other by
what examinations find.

* An order that acts on the node is given only with a permit of the fleet, and is never repeated
  because its answer got lost: the node is probed first.
* A cancel is obeyed until such an order was given. After that the repair goes on to its end,
  because the state of the node must be known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Literal, TypeVar, assert_never

from temporalio import workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from relaunch.access.orders import (
        REPAIR_ANSWER,
        REPAIR_ORDER,
        REPAIR_PROOF_LIFETIME,
        OrderVerdict,
        PersonOrder,
        SignedText,
        UsedProof,
        check_order,
        read_signed,
    )
    from relaunch.activities.examine import DIAGNOSE_TIMEOUTS, NodeTerms
    from relaunch.evidence.catalog import catalog
    from relaunch.evidence.fields import text
    from relaunch.evidence.findings import Verdict
    from relaunch.evidence.health import Health
    from relaunch.messages.bounds import MAX_REASON, bound_message
    from relaunch.messages.jobs import AnswerMessage, NodeRepairInput, NodeRepairResult, explain
    from relaunch.messages.notices import Notice
    from relaunch.pool.messages import Healing
    from relaunch.repair.conditions import count_reboots
    from relaunch.repair.escalation import (
        Escalation,
        EscalationDecision,
        ExamineNode,
        PastRepair,
        StartStrategy,
        apply_examination,
        apply_strategy_end,
        cancel,
        choose_next,
    )
    from relaunch.repair.explain import describe_order, explain_other_approval, kind_of_order
    from relaunch.repair.machine import (
        PROBE_TIMEOUT,
        begin,
        explain_settled,
        find_asking_interval,
        step,
    )
    from relaunch.repair.state import (
        AskPerson,
        FinishRepair,
        Order,
        OrderExpired,
        OrderRefused,
        PermitAnswered,
        PersonAnswered,
        PowerCycleNode,
        ProbeNode,
        RebootNode,
        RepairCancelRequested,
        RepairDecision,
        RepairEvent,
        RepairRules,
        RepairState,
        ResetGpus,
        RunDiag,
        TimeExpired,
        WaitEnded,
        WaitForNode,
    )
    from relaunch.spec.policy import Strategy
    from relaunch.text import escape_markdown
    from relaunch.workflows.node_repair.orders import examine_node, read_terms, send_order
    from relaunch.workflows.node_repair.permits import Permits
    from relaunch.workflows.notifier.tell import END_TIMEOUT, tell_people
    from relaunch.workflows.search_attributes import (
        NODES,
        STRATEGY,
        escalation_details,
        repair_details,
    )
    from relaunch.workflows.updates import await_next_task, read_signed_message, reject

STRATEGY_TIMEOUT = timedelta(minutes=45)
"""For a strategy that an examination calls for, with the examination that proves it: a reboot takes
up to 25 minutes, DCGM 15."""
MAX_TIMER_SUMMARY = 200
TELL_TIMEOUT = timedelta(seconds=10)
"""How long a repair that a job waits for waits for its notices to be posted: the job waits 15 s
longer than the repair may take."""

ASKING_PROBES_PATCH = "probe-while-asked"
"""Repairs that began before it wait for the answer only."""

DENY_PATCH = "a-queued-deny-wins"
"""Marks histories in which an answer that is not applied yet counts against the next one."""
REFUSAL_PATCH = "a-refusal-is-no-attempt"
"""Marks histories in which an order that the node would not carry out was not given."""
POWER_PATCH = "a-power-cycle-not-given"
"""Marks histories in which a power cycle that follows a reboot is given although its permit came
late."""
WITHOUT_EFFECT = ("busy", "held", "other_fleet", "rebooting", "not_proven", "late")
"""Refusals of nodes to which nothing was done, because they are in use or the order does not
count."""

MAX_ORDERED_REPAIR = REPAIR_PROOF_LIFETIME / 2
"""How long a repair may take that a person orders where `access` is set; the command line gives it
40 minutes."""

Result = TypeVar("Result")


@workflow.defn
class NodeRepair:
    @workflow.init
    def __init__(self, start: NodeRepairInput) -> None:
        self._input = start
        info = workflow.info()
        # After a reset of the workflow as before it: by the id, the node's journal tells an order
        # of this repair that its workflow has forgotten.
        self._id = f"{info.workflow_id}/{info.original_execution_run_id}"
        self._catalog = catalog(start.catalog)
        self._inbox: list[RepairEvent] = []
        """Events that were not applied yet."""
        self._permits = Permits(start, is_interrupted=lambda: bool(self._inbox))
        self._terms = NodeTerms("observe", 0)
        self._escalation: Escalation | None = None
        self._state: RepairState | None = None
        self._decision: RepairDecision | EscalationDecision | None = None
        self._telling: asyncio.Task[None] | None = None
        """The last notice to people, on its way."""
        self._used_proofs: tuple[UsedProof, ...] = ()
        self._signed: SignedText | None = None
        """The order or the approval of a person that holds now."""

    @workflow.run
    async def run(self, start: NodeRepairInput) -> NodeRepairResult:
        workflow.upsert_search_attributes([NODES.value_set([start.node])])
        self._terms = await self._run_to_end(read_terms(start))
        if workflow.info().parent is None and self._terms.access is not None:
            verdict = self._check_caller(start)
            if verdict.refusal:
                return await self._refuse(verdict)
            # Within the time for which the fleet knows that the signature was used.
            deadline = min(start.deadline, workflow.now() + MAX_ORDERED_REPAIR)
            start = replace(start, by=verdict.by, approved_by=verdict.by, deadline=deadline)
            self._input = start
            self._permits.replace_order(start)
        if obstacle := self._find_obstacle():
            return await self._report_end(FinishRepair("refused", Verdict.UNKNOWN, obstacle))
        await self._run_to_end(self._permits.report_begin())
        try:
            if start.strategy is None:
                end = await self._escalate()
            else:
                ordered = StartStrategy(start.strategy, start.gpus, start.reason, start.power)
                _, end = await self._run_strategy(ordered, start.deadline)
        except Exception as error:
            if workflow.is_failure_exception(error):
                reason = f"the repair failed: {error}"
                await self._report_end(FinishRepair("ambiguous", Verdict.UNKNOWN, reason))
            raise
        return await self._report_end(end)

    def _check_caller(self, start: NodeRepairInput) -> OrderVerdict:
        """Return whether the person who has started this repair may order it.

        A repair that a fleet or a job orders is their child, which only a workflow can make it.
        """
        message = {**start.describe_repair(), "proof": _dump(start)}
        info = workflow.info()
        signed = self._signed = read_signed(info.namespace, info.workflow_id, REPAIR_ORDER, message)
        what = _describe_order(start)
        return self._check(PersonOrder("repair", what, start.by, signed))

    async def _refuse(self, verdict: OrderVerdict) -> NodeRepairResult:
        """End without anything done, and without the fleet: to it, nothing has begun."""
        workflow.set_current_details(f"refused: {escape_markdown(verdict.refusal)}")
        return NodeRepairResult(self._input.node, "refused", verdict.refusal)

    def _check(self, order: PersonOrder) -> OrderVerdict:
        fleet, now = self._input.fleet, workflow.now()
        verdict = check_order(self._terms.access, fleet, order, now, self._used_proofs)
        self._used_proofs = verdict.used
        return verdict

    def _find_obstacle(self) -> str:
        """Return why the node cannot be repaired at all; empty if it can."""
        start, terms = self._input, self._terms
        if terms.unknown:
            return terms.unknown
        if start.power and not terms.power:
            missing = (
                f"the file of fleet {start.fleet} has no power: {{cycle: [COMMAND, …]}} for it"
            )
            return f"cannot power-cycle {start.node}: {missing}"
        if start.strategy is Strategy.RESET_GPU and terms.no_reset:
            # Before a person is asked for approval of an order that would be refused.
            return f"cannot reset the GPUs of {start.node}: {terms.no_reset}"
        return ""

    async def _report_end(self, end: FinishRepair) -> NodeRepairResult:
        await self._run_to_end(self._permits.report_end(end, self._find_healing(end)))
        if (telling := self._telling) is not None and not telling.done():
            within = TELL_TIMEOUT if self._input.job else END_TIMEOUT
            await self._run_to_end(_finish(telling, within))
        return NodeRepairResult(self._input.node, end.outcome, end.reason, end.verdict)

    def _find_healing(self, end: FinishRepair) -> Healing | None:
        """Return the last strategy if it was carried out and the node examined healthy since."""
        state = self._state
        if end.verdict is not Verdict.HEALTHY or state is None or state.proven_at is None:
            return None
        is_reset = state.strategy is Strategy.RESET_GPU
        return Healing(state.strategy, state.proven_at, state.gpus if is_reset else ())

    async def _escalate(self) -> FinishRepair:
        """Examine the node and carry out strategies, until it is healthy or nothing is left to
        do."""
        start = self._input
        escalation = Escalation(
            start.node,
            start.reason,
            can_reset=not self._terms.no_reset,
            can_power_cycle=self._terms.power,
            after_reboot=start.after_reboot,
            healed=tuple(PastRepair(one.strategy, one.at, one.gpus) for one in start.healed),
        )
        while True:
            for event in self._take_events():
                if isinstance(event, RepairCancelRequested):
                    escalation = cancel(escalation, event.reason)
            decision = choose_next(escalation, start.deadline - workflow.now())
            self._show_escalation(escalation, decision)
            match decision:
                case FinishRepair():
                    return decision
                case ExamineNode():
                    # Once something was done to the node, its state must be known; before that an
                    # examination may be cancelled.
                    health = await self._run_to_end(
                        self._examine(escalation, decision), can_cancel=not escalation.acted
                    )
                    if health is not None:
                        escalation = apply_examination(escalation, health, workflow.now())
                case StartStrategy():
                    # One strategy must not use up the time of all: a node that never comes back
                    # from a reboot would leave no time for the others.
                    deadline = min(start.deadline, workflow.now() + STRATEGY_TIMEOUT)
                    state, end = await self._run_strategy(decision, deadline)
                    escalation = apply_strategy_end(escalation, state, end, workflow.now())
                case _:
                    assert_never(decision)

    async def _run_strategy(
        self, ordered: StartStrategy, deadline: datetime
    ) -> tuple[RepairState, FinishRepair]:
        """Carry out one strategy, from the first probe to the examination that proves it."""
        workflow.upsert_search_attributes([STRATEGY.value_set(ordered.strategy.value)])
        state = self._begin_strategy(ordered, deadline)
        while True:
            state, decision = step(state, self._take_events(), workflow.now(), self._catalog)
            self._show_strategy(state, decision)
            if isinstance(decision, FinishRepair):
                return state, await self._add_refusal_of_fleet(state, decision)
            event = await self._run_to_end(self._carry_out(state, decision))
            if isinstance(event, OrderRefused) and event.why in WITHOUT_EFFECT:
                event = replace(event, is_attempt=not workflow.patched(REFUSAL_PATCH))
            elif isinstance(event, PermitAnswered) and state.power and state.attempts:
                event = replace(event, is_unused=workflow.patched(POWER_PATCH))
            self._inbox.append(event)

    def _begin_strategy(self, ordered: StartStrategy, deadline: datetime) -> RepairState:
        start, terms = self._input, self._terms
        before = self._state.health if self._state is not None else None
        return begin(
            id=self._id,
            fleet=start.fleet,
            node=start.node,
            strategy=ordered.strategy,
            gpus=ordered.gpus,
            reason=ordered.reason,
            by=start.by,
            rules=RepairRules(
                mode=terms.repairs,
                level=start.level,
                expected_gpus=terms.gpus,
                diag_timeout=DIAGNOSE_TIMEOUTS.get(start.level, timedelta(0)),
                answer_timeout=start.answer_within,
                has_power_command=terms.power,
                job_waits=bool(start.job),
                by_examination=start.strategy is None,
            ),
            now=workflow.now(),
            deadline=deadline,
            approved_by=start.approved_by,
            power=ordered.power,
            boot_id=before.boot_id if ordered.power and before is not None else "",
        )

    async def _add_refusal_of_fleet(self, state: RepairState, end: FinishRepair) -> FinishRepair:
        """Add to the refusal of a job's repair why the fleet does not permit it.

        Of a shared node, the fleet knows which jobs have to leave first and by when; the node
        itself only reports that it is in use.
        """
        is_refused_by_node = end.outcome == "refused" and not state.attempts
        if not (self._input.job and is_refused_by_node and state.health and state.health.busy):
            return end
        refusal = await self._run_to_end(
            self._permits.find_refusal(state.reason, lambda: self._show_strategy(state, end))
        )
        return replace(end, reason=f"{end.reason}; {refusal}") if refusal else end

    def _take_events(self) -> list[RepairEvent]:
        events, self._inbox[:] = list(self._inbox), []
        answers = [one for one in events if isinstance(one, PersonAnswered)]
        is_disputed = len({one.approve for one in answers}) > 1
        if is_disputed and workflow.patched(DENY_PATCH):
            # Nothing was done yet. What a person has denied is not done.
            return [one for one in events if one not in answers or not one.approve]
        return events

    async def _run_to_end(
        self, action: Coroutine[Any, Any, Result], *, can_cancel: bool = False
    ) -> Result:
        """Wait for an action to end, even if the workflow is cancelled: an order under way cannot
        be taken back.

        With `can_cancel` the action is cancelled, too.
        """
        task = asyncio.create_task(action)
        while True:
            try:
                await workflow.wait([task])
            except asyncio.CancelledError as error:
                reason = workflow.cancellation_reason() or str(error) or "the repair was cancelled"
                self._inbox.append(RepairCancelRequested(reason))
                if can_cancel:
                    task.cancel()
            else:
                return task.result()

    # --- carrying out decisions

    async def _carry_out(self, state: RepairState, decision: RepairDecision) -> RepairEvent:
        match decision:
            case WaitForNode():
                await self._wait_until(workflow.now() + decision.delay, decision.reason)
                return WaitEnded()
            case AskPerson():
                return await self._ask_person(state, decision)
            case ProbeNode() | RunDiag():
                return await send_order(self._input, self._id, decision)
            case ResetGpus() | RebootNode() | PowerCycleNode():
                if obstacle := await self._ask_permit(state, decision):
                    return obstacle
                event = await send_order(
                    self._input, self._id, decision, state.approved_by, self._signed
                )
                if not isinstance(event, OrderExpired):
                    self._permits.note_order()
                return event
            case FinishRepair():
                raise ValueError(f"{decision} is the end of a repair")
            case _:
                assert_never(decision)

    async def _examine(self, escalation: Escalation, decision: ExamineNode) -> Health | None:
        """Examine the node after the delay; return None if a cancel came first."""
        if decision.delay:
            try:
                if await self._wait_until(workflow.now() + decision.delay, decision.reason):
                    return None
            except asyncio.CancelledError:
                return None
        has_gpus = self._terms.gpus > 0
        return await examine_node(self._input, self._id, escalation.kernel_from, has_gpus)

    async def _ask_permit(self, state: RepairState, decision: Order) -> RepairEvent | None:
        """Ask the fleet for a permit; return None if the order may be given now."""
        kind: Literal["reset", "reboot"] = "reset" if isinstance(decision, ResetGpus) else "reboot"
        return await self._permits.ask(
            kind,
            describe_order(state),
            decision.reason,
            state.deadline,
            lambda: self._show_strategy(state, decision),
            power=isinstance(decision, PowerCycleNode),
            reboots=count_reboots(state, workflow.now()),
        )

    async def _ask_person(self, state: RepairState, decision: AskPerson) -> RepairEvent:
        """Show the question on the page of the waiting job, too, and wait for the answer, or until
        the node shows that none is needed any more."""
        approve, deny = self._write_answers(state)
        how = f"Answer with `{approve} --reason …` or `{deny} --reason …`"
        question = join_question(decision.question, f"{how}; without an answer it is not done")
        await self._show_question(question, decision.until)
        unanswered = f"without an answer, relaunch does not {describe_order(state)}"
        asked = self._describe_question(state, decision.question, unanswered)
        self._tell_people(asked)
        is_answered, probe, settled = await self._await_answer(state, decision, unanswered)
        await self._show_question("", None)
        ended = "it was answered" if is_answered else settled or "there was no answer in time"
        cancels = [one for one in self._inbox if isinstance(one, RepairCancelRequested)]
        if cancels:
            ended = f"the repair was cancelled: {cancels[0].reason}"
        self._tell_people(
            replace(asked, state="resolved", reason=ended, at=workflow.now(), wanted="", command="")
        )
        if probe is not None:
            return probe
        return WaitEnded() if is_answered else TimeExpired()

    async def _await_answer(
        self, state: RepairState, decision: AskPerson, unanswered: str
    ) -> tuple[bool, RepairEvent | None, str]:
        """Wait for an answer, and probe the node meanwhile.

        Returns:
            Whether there is an answer; otherwise the probe that makes the question needless, with
            the reason, if there is one.
        """
        asked_at, is_probed = workflow.now(), workflow.patched(ASKING_PROBES_PATCH)
        while True:
            now = workflow.now()
            at = decision.until
            if is_probed:
                at = min(at, now + find_asking_interval(now - asked_at))
            if await self._wait_until(at, unanswered):
                return True, None, ""
            if workflow.now() >= decision.until:
                return False, None, ""
            why = f"a person is asked whether to {describe_order(state)}"
            probe = await send_order(self._input, self._id, ProbeNode(PROBE_TIMEOUT, None, why))
            if settled := explain_settled(state, probe, self._catalog):
                return False, probe, settled

    def _write_answers(self, state: RepairState) -> tuple[str, str]:
        """Return the commands that approve and deny what is asked, without the reason.

        An approval names what it approves. If another repair is asked about when it arrives, it is
        refused.
        """
        start = self._input
        answer, fleet = f"relaunch nodes answer {start.node}", f"--fleet {start.fleet}"
        return f"{answer} approve --{kind_of_order(state)} {fleet}", f"{answer} deny {fleet}"

    def _describe_question(self, state: RepairState, question: str, unanswered: str) -> Notice:
        start, info = self._input, workflow.info()
        approve, deny = self._write_answers(state)
        return Notice(
            "question",
            f"{start.fleet}/question/repair/{start.node}",
            f"a repair of node {start.node} of fleet {start.fleet} waits for approval",
            question,
            workflow.now(),
            done="nothing yet; the node stays as it is",
            wanted=f"an answer; {unanswered}",
            command=f"{approve} --reason …, or {deny} --reason …",
            details=(f"ordered by {start.by}: {start.reason}",),
            job=start.job,
            nodes=(start.node,),
            workflow=info.workflow_id,
            run=info.run_id,
        )

    def _tell_people(self, notice: Notice) -> None:
        """Post a notice after the one before, beside what the repair does."""
        before, fleet = self._telling, self._input.fleet

        async def post() -> None:
            if before is not None:
                await _finish(before)
            await tell_people(fleet, (notice,))

        self._telling = asyncio.create_task(post())

    async def _show_question(self, question: str, until: datetime | None) -> None:
        """Have the waiting job show the question on its page; an empty question removes it."""
        job = workflow.info().parent
        if job is None or not self._input.job:
            return
        message = {
            "node": self._input.node,
            "question": question,
            "until": until.isoformat() if until else None,
        }
        handle = workflow.get_external_workflow_handle(job.workflow_id)
        try:
            await handle.signal("repair_asks", message)
        except ApplicationError as error:
            # The job has ended; the page of the repair still shows the question.
            workflow.logger.info("%s did not take the question: %s", job.workflow_id, error)

    async def _wait_until(self, at: datetime, summary: str) -> bool:
        """Wait until then; return whether an event arrived before."""
        delay = max(timedelta(0), at - workflow.now())
        try:
            await workflow.wait_condition(
                lambda: bool(self._inbox),
                timeout=delay,
                timeout_summary=escape_markdown(summary)[:MAX_TIMER_SUMMARY],
            )
        except TimeoutError:
            return False
        return True

    # --- the page in the web UI

    def _show_escalation(self, escalation: Escalation, decision: EscalationDecision) -> None:
        self._escalation, self._decision = escalation, decision
        workflow.logger.info("%s: %s", decision.kind, decision.reason)
        start = self._input
        workflow.set_current_details(
            escalation_details(escalation, decision, start.by, start.deadline)
        )

    def _show_strategy(self, state: RepairState, decision: RepairDecision) -> None:
        self._state, self._decision = state, decision
        waiting_for = self._permits.waiting_for
        workflow.logger.info("%s: %s", decision.kind, waiting_for or decision.reason)
        workflow.set_current_details(repair_details(state, decision, self._escalation, waiting_for))

    # --- messages from people and the fleet

    @workflow.update(
        description="Answer what this repair asks: "
        '{"decision": "approve" | "deny", "repair": "reset-gpus" | "reboot" | "power-cycle", '
        '"reason": "…", "by": "…"}. An approval of another repair than the one asked about is '
        "refused."
    )
    async def answer(self, message: Any = None, *_more: Any) -> str:
        answer = AnswerMessage.model_validate(bound_message(message))
        await await_next_task()
        approved = answer.decision == "approve"
        node = self._input.node
        # Another question may have come up since the answer was accepted.
        if other := self._explain_other(answer):
            raise reject(other)
        signed = read_signed_message(REPAIR_ANSWER, message)
        verdict = self._check(
            PersonOrder(
                "repair" if approved else "answer",
                f"{'approve' if approved else 'deny'} the repair of {node}",
                answer.by,
                signed,
            )
        )
        if verdict.refusal:
            raise reject(verdict.refusal)
        if (late := self._explain_late(approved)) and workflow.patched(DENY_PATCH):
            raise reject(late)
        self._signed = signed
        self._inbox.append(PersonAnswered(approved, verdict.by, answer.reason, answer.repair))
        return "approved" if approved else "denied"

    @answer.validator
    def _check_answer(self, message: Any = None, *_more: Any) -> None:
        try:
            answer = AnswerMessage.model_validate(
                bound_message({} if message in (None, "") else message)
            )
        except ValueError as error:
            raise reject(explain(error)) from None
        if answer.decision not in ("approve", "deny"):
            raise reject(f"decision: {answer.decision or 'missing'}, expected approve or deny")
        if not isinstance(self._decision, AskPerson):
            raise reject(f"this repair asks nothing now: {self._describe_next()}")
        if other := self._explain_other(answer):
            raise reject(other)
        if answer.decision == "approve" and answer.proof is not None and not answer.repair:
            raise reject("repair: missing; a signed approval names what it approves")

    def _explain_late(self, approved: bool) -> str:
        """Return why an answer comes too late, although it was asked for when it arrived."""
        if not isinstance(self._decision, AskPerson):
            return f"this repair asks nothing now: {self._describe_next()}"
        if any(isinstance(one, RepairCancelRequested) for one in self._inbox):
            return "this repair was cancelled meanwhile"
        if workflow.now() >= self._decision.until:
            return "the time for an answer is over"
        denials = [one for one in self._inbox if isinstance(one, PersonAnswered)]
        denied = next((one for one in denials if not one.approve), None)
        if approved and denied is not None:
            return f"{denied.by or 'a person'} has denied it already"
        return ""

    def _explain_other(self, answer: AnswerMessage) -> str:
        if answer.decision != "approve" or self._state is None:
            return ""
        return explain_other_approval(self._state, answer.repair)

    @workflow.signal(description="The fleet's answer to a request for a permit.")
    def permitted(self, message: Any = None, *_more: Any) -> None:
        self._permits.receive(message)

    @workflow.signal(
        description="Another build of relaunch is to work for this repair. Only relaunch sends it."
    )
    def upgrade(self, *_more: Any) -> None:
        """Nothing: a repair ends within hours, on the build that it began on while that has a
        worker."""

    @workflow.query(description="State of the strategy that is under way, or was the last.")
    def state(self) -> RepairState | None:
        return self._state

    @workflow.query(
        description="What was found and done so far, where examinations choose the strategy."
    )
    def escalation(self) -> Escalation | None:
        return self._escalation

    @workflow.query(
        description="Whether a person's order may be signed. Only the command line asks it."
    )
    def takes_proofs(self) -> bool:
        return True

    @workflow.query(description="What this repair does now.")
    def next(self) -> str:
        return self._describe_next()

    def _describe_next(self) -> str:
        if self._decision is None:
            return "the repair begins"
        return f"{self._decision.kind}: {self._permits.waiting_for or self._decision.reason}"


def join_question(question: str, answers: str) -> str:
    """Return a question with the commands that answer it, as a job shows it.

    A job keeps `MAX_REASON` characters: what does not fit is lost of the question, and not of the
    commands.
    """
    return f"{text(question, max(80, MAX_REASON - len(answers) - 1))} {answers}"


async def _finish(task: asyncio.Task[None], timeout: timedelta | None = None) -> None:
    await workflow.wait([task], timeout=timeout.total_seconds() if timeout else None)


def _dump(start: NodeRepairInput) -> dict[str, Any] | None:
    return None if start.proof is None else start.proof.model_dump(mode="json")


def _describe_order(start: NodeRepairInput) -> str:
    """Return what a person orders, as it follows `may not`."""
    if start.strategy is None:
        return f"repair {start.node}"
    if start.power:
        return f"power-cycle {start.node}"
    resets = start.strategy is Strategy.RESET_GPU
    return f"reset the GPUs of {start.node}" if resets else f"reboot {start.node}"
