"""Signals, updates and queries of a job. Any message may arrive, and none raises.

A message that can be parsed becomes an event in the inbox, any other a notice. Nothing is decided
here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from relaunch.access.orders import PersonOrder, SignedText
    from relaunch.fields import duration
    from relaunch.job.decide import check_answer, describe_approval
    from relaunch.job.drain import find_drain
    from relaunch.job.events import (
        Answered,
        CancelRequested,
        Event,
        MessageRejected,
        NodeDeclaredDead,
        NodesOffered,
        PersonEvent,
        PolicyChanged,
        RetryRequested,
    )
    from relaunch.job.next_step import describe_next
    from relaunch.job.state import JobState, Phase
    from relaunch.messages.bounds import MAX_TEXT, bound_message
    from relaunch.messages.jobs import (
        OFFER,
        AnswerMessage,
        HintMessage,
        PolicyMessage,
        answer_event,
        cancel_event,
        drain_event,
        explain,
        overlay,
        repair_asks_event,
        report_event,
        retry_event,
    )
    from relaunch.spec.access import Permission
    from relaunch.spec.policy import Policy
    from relaunch.text import format_time
    from relaunch.workflows.training_job.claims import Claims
    from relaunch.workflows.training_job.orders import Orders
    from relaunch.workflows.training_job.session import Session
    from relaunch.workflows.training_job.watches import Watches
    from relaunch.workflows.updates import await_next_task, read_signed_message, reject


class MessageHandlers:
    """Base class of the job's workflow, with its handlers."""

    _session: Session
    _orders: Orders
    _claims: Claims
    _watches: Watches

    @workflow.signal(
        description='Stop every rank and end the job. {"reason": "…", "by": "…"}, all optional.'
    )
    def cancel(self, message: Any = None, *_more: Any) -> None:
        self._receive_order("cancel", message, cancel_event)

    @workflow.signal(
        description='Launch a new generation now. {"reason", "by", "avoid_nodes": [], '
        '"renew_budgets": false}, all optional.'
    )
    def force_retry(self, message: Any = None, *_more: Any) -> None:
        self._receive_order("force_retry", message, retry_event)

    @workflow.signal(
        description="A repair that this job waits for has a question to a person. Only the repair "
        "sends it."
    )
    def repair_asks(self, message: Any = None, *_more: Any) -> None:
        self._receive("repair_asks", message, repair_asks_event)

    @workflow.signal(
        description="The fleet's answer to a claim of this job. Only the fleet sends it."
    )
    def granted(self, message: Any = None, *_more: Any) -> None:
        try:
            self._claims.take_grant(bound_message(message, MAX_TEXT))
        except ValueError as error:
            self._session.post(MessageRejected("granted", explain(error)))

    @workflow.signal(
        description="The fleet has more nodes for this job, if it wants to grow. Only the fleet "
        "sends it."
    )
    def nodes_offered(self, message: Any = None, *_more: Any) -> None:
        try:
            offer = OFFER.validate_python(bound_message(message, MAX_TEXT))
        except ValueError as error:
            self._session.post(MessageRejected("nodes_offered", explain(error)))
            return
        if self._claims.is_current(offer):
            self._session.post(NodesOffered(offer.nodes, offer.until))

    @workflow.signal(description="Drain a node, or cancel that request. Only the fleet sends it.")
    def drain_node(self, message: Any = None, *_more: Any) -> None:
        self._receive("drain_node", message, drain_event)

    @workflow.signal(
        description="The fleet was started again and asks what this job has. Only the fleet sends "
        "it."
    )
    def claim_again(self, *_more: Any) -> None:
        self._claims.start_resend()

    @workflow.signal(
        description='Vouch for a node: {"node": "n2", "declared": "dead", "reason": "…", "by": '
        '"…", "force": false}.'
    )
    def report(self, message: Any = None, *_more: Any) -> None:
        self._receive_order("report", message, lambda raw: report_event(raw, self._session.job))

    @workflow.signal(
        description="Something may have happened to a rank: the watch probes now. Only relaunch "
        "sends it."
    )
    def hint(self, message: Any = None, *_more: Any) -> None:
        try:
            self._watches.probe_now(HintMessage.model_validate(bound_message(message or {})))
        except ValueError as error:
            self._session.post(MessageRejected("hint", explain(error)))

    @workflow.signal(
        description="Another build of relaunch is to work for this job. Only relaunch sends it."
    )
    def upgrade(self, *_more: Any) -> None:
        """Nothing: the server tells with the task of this signal which build is to work for it."""

    def _receive(self, name: str, message: Any, parse: Callable[[Any], Event]) -> None:
        try:
            self._session.post(parse(bound_message({} if message in (None, "") else message)))
        except ValueError as error:
            self._session.post(MessageRejected(name, explain(error)))

    def _receive_order(self, name: str, message: Any, parse: Callable[[Any], Event]) -> None:
        """Take what a person orders, once it is known that they may."""
        message = {} if message in (None, "") else message
        try:
            event = parse(bound_message(message))
        except ValueError as error:
            self._session.post(MessageRejected(name, explain(error)))
            return
        self._take_order(name, event, message)

    def _take_order(self, name: str, event: Event, message: Any) -> None:
        """Take an order in the form of an event; `message` is what was sent, None for nothing."""
        if not isinstance(event, PersonEvent) or not self._orders.has_to_check():
            self._session.post(event)
            return
        signed = read_signed_message(name, message)

        async def check() -> None:
            order = self._describe_order(event, signed)
            verdict = await self._orders.check(name, order)
            if verdict.refusal:
                self._session.post(MessageRejected(name, verdict.refusal, "was refused"))
            else:
                self._session.post(replace(event, by=verdict.by))

        self._session.tasks.start(f"check {name}", check())

    def _describe_order(self, event: PersonEvent, signed: SignedText | None) -> PersonOrder:
        job = self._session.job
        owner: str | None = job.submitted_by
        permission: Permission
        match event:
            case CancelRequested():
                permission, what = "cancel", f"cancel job {job.name}"
            case RetryRequested():
                permission, what = "retry", f"retry job {job.name}"
            case NodeDeclaredDead():
                # It is about a node: who has submitted the job on it does not matter.
                permission, what, owner = "declare-dead", f"declare {event.node} dead", None
            case Answered():
                permission, what = "answer", f"tell job {job.name} {event.decision}"
            case PolicyChanged():
                permission, what = "policy", f"change the policy of job {job.name}"
        return PersonOrder(permission, what, event.by, signed, owner)

    async def _check_update(self, name: str, event: PersonEvent, message: Any) -> PersonEvent:
        """Return the event of an update with who has sent it.

        Raises:
            ApplicationError: They may not.
        """
        if not self._orders.has_to_check():
            return event
        order = self._describe_order(event, read_signed_message(name, message))
        verdict = await self._orders.check(name, order)
        if verdict.refusal:
            self._session.post(MessageRejected(name, verdict.refusal, "was refused"))
            raise reject(verdict.refusal)
        return replace(event, by=verdict.by)

    @workflow.query(
        description="Which of the newest orders were taken, and why others were refused. Only the "
        "command line asks it."
    )
    def orders(self) -> list[dict[str, Any]]:
        return [asdict(one) for one in self._orders.outcomes]

    @workflow.update(
        description='Lay keys over the policy, from now on: {"policy": {"max_restarts": 12}, '
        '"reason": "…", "by": "…"}.'
    )
    async def change_policy(self, message: Any = None, *_more: Any) -> str:
        changed = PolicyMessage.model_validate(bound_message(message or {}))
        await await_next_task()
        # It was consistent with the policy at that time; another change may have come since.
        event = PolicyChanged(self._overlay(changed), changed.reason, changed.by)
        checked = await self._check_update("change_policy", event, message)
        # Another change may have come while this one was checked.
        self._session.post(PolicyChanged(self._overlay(changed), changed.reason, checked.by))
        return "the policy is in force from the next decision on"

    def _overlay(self, changed: PolicyMessage) -> Policy:
        """Lay keys over the newest policy, which may still be in the inbox.

        Raises:
            ApplicationError: The resulting policy is inconsistent.
        """
        waiting = [one.policy for one in self._session.inbox if isinstance(one, PolicyChanged)]
        try:
            return overlay(waiting[-1] if waiting else self._session.job.policy, changed.policy)
        except ValueError as error:
            raise reject(explain(error)) from None

    @change_policy.validator
    def _check_policy(self, message: Any = None, *_more: Any) -> None:
        try:
            changed = PolicyMessage.model_validate(bound_message(message or {}))
        except ValueError as error:
            raise reject(explain(error)) from None
        self._overlay(changed)
        if not changed.policy:
            raise reject("policy: missing, expected the keys to change")

    @workflow.update(
        description='Answer what it asks: {"decision": "approve|deny|snooze|take-over", "reason": '
        '"…", "by": "…", "within": "2h"}.'
        ' With {"decision": "approve|deny", "node": "n2"}: whether it leaves a node that is '
        "wanted, at once or not before it has to."
    )
    async def answer(self, message: Any = None, *_more: Any) -> str:
        answered = AnswerMessage.model_validate(bound_message(message))
        await await_next_task()
        event = answer_event(answered, workflow.now())
        self._session.post(await self._check_update("answer", event, message))
        if answered.node:
            return self._confirm_drain_answer(answered.node, answered.decision == "approve")
        if answered.decision == "approve":
            return f"a new generation is launched {describe_approval(self._session.job)}".strip()
        return {
            "deny": "the job ends as FAILED",
            "snooze": f"it is asked again in {duration(answered.within)}",
            "take-over": "nothing is done until a person says approve, deny, retry or cancel",
        }[answered.decision]

    def _confirm_drain_answer(self, node: str, now: bool) -> str:
        if now:
            is_running = self._session.job.phase is Phase.RUNNING
            when = "at once" if is_running else "with the next launch, or as soon as it runs"
            return f"{node} is left {when}"
        drain = find_drain(self._session.job, node)
        return f"it stays on {node}" + (f" until {format_time(drain.until)}" if drain else "")

    @answer.validator
    def _check_answer(self, message: Any = None, *_more: Any) -> None:
        try:
            answered = AnswerMessage.model_validate(
                bound_message({} if message in (None, "") else message)
            )
        except ValueError as error:
            raise reject(explain(error)) from None
        if not answered.decision:
            raise reject("decision: missing, expected approve, deny, snooze or take-over")
        if answered.repair:
            raise reject(f"repair: {answered.repair}; a repair is answered on its own page")
        if refusal := check_answer(
            self._session.job, answered.decision, workflow.now(), answered.node
        ):
            raise reject(
                f"job {self._session.job.name} cannot be told {answered.decision}: {refusal}"
            )

    @workflow.query(description="Everything the job knows about itself.")
    def state(self) -> JobState:
        return self._session.job

    @workflow.query(description="What happens next, and when.")
    def next(self) -> dict[str, str | None]:
        at = self._session.job.next.at
        return {"what": describe_next(self._session.job), "at": at.isoformat() if at else None}
