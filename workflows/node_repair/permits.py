"""Messages between a repair and its fleet: its begin, its end, and a permit for each order.

The wait for a permit is here and not in `relaunch.repair.machine`: it is between two workflows, and
either may repeat, lose or make up messages. The state machine gets only the result: the order is
refused, or the node has to be probed again before the order is given.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from pydantic import TypeAdapter

    from relaunch.activities.fleet import FleetActivities, TellFleetInput
    from relaunch.messages.bounds import MAX_TEXT, bound_message
    from relaunch.messages.jobs import NodeRepairInput, explain
    from relaunch.pool.events import RepairResult, RepairStart
    from relaunch.pool.messages import Healing, Permit, PermitRequest
    from relaunch.repair.state import FinishRepair, PermitAnswered, WaitEnded
    from relaunch.workflows.training_job.commands import KEEP_TRYING

PERMIT = TypeAdapter(Permit)
SEND_TIMEOUT = timedelta(seconds=30)
"""For a fleet to accept a message. A repair ends without it, but never acts without a permit."""
SEND_END_TIMEOUT = timedelta(seconds=10)
"""As `SEND_TIMEOUT`, for the end of a repair: a job waits for it 15 s longer than the repair itself
may take."""
SEND_ATTEMPT_TIMEOUT = timedelta(seconds=10)
"""Of one attempt; the server answers in milliseconds."""
RESEND_INTERVAL = timedelta(minutes=5)
"""How often a request is repeated: a fleet that was terminated and restarted does not know it."""
MAX_PERMIT_DELAY = timedelta(seconds=5)
"""A permit that comes later than this is not used at once: a job may have begun to use the node, so
it is probed again."""
LATE_PERMIT_TTL = timedelta(minutes=1)
"""How long such a permit stays valid while the node is probed again. An older one may be out of
date because the fleet's breaker has opened."""


PERMIT_TIME_PATCH = "a-permit-ages-on-its-way"
"""Marks histories in which a permit is valid from when it was given, not from when it was read."""


@dataclass(frozen=True, slots=True)
class LatePermit:
    order: str
    """What it permits."""
    until: datetime
    """Until when it is valid, counted from when it was read."""
    until_given: datetime
    """The same, counted from when the fleet gave it."""

    def is_valid(self, order: str) -> bool:
        now = workflow.now()
        if self.order != order or now >= self.until:
            return False
        # Where no worker has run meanwhile, the fleet's breaker may have opened long ago.
        return now < self.until_given or not workflow.patched(PERMIT_TIME_PATCH)


class Permits:
    """Sends the messages of one repair to its fleet, and receives the permits.

    `is_interrupted` returns whether another event has arrived, which comes first.
    """

    def __init__(self, repair: NodeRepairInput, is_interrupted: Callable[[], bool]) -> None:
        self._repair = repair
        self._is_interrupted = is_interrupted
        self._seq = 0
        self._answer: Permit | None = None
        self._late_permit: LatePermit | None = None
        self._unused: datetime | None = None
        """When the last permit was given, if no order was given since."""
        self.waiting_for = ""
        """What the repair waits for, as a clause; empty if for nothing."""

    def replace_order(self, repair: NodeRepairInput) -> None:
        """Name the caller as far as that is proven, from now on."""
        self._repair = repair

    async def report_begin(self) -> None:
        repair, info = self._repair, workflow.info()
        began = RepairStart(repair.node, info.workflow_id, info.run_id, repair.by, repair.reason)
        await self._send("repair_began", began, SEND_TIMEOUT)

    async def report_end(self, end: FinishRepair, healing: Healing | None) -> None:
        repair, info = self._repair, workflow.info()
        ended = RepairResult(
            repair.node,
            info.workflow_id,
            info.run_id,
            repair.by,
            repair.job,
            end.outcome,
            end.verdict,
            end.reason,
            healing,
        )
        await self._send("repair_ended", ended, SEND_END_TIMEOUT)

    async def ask(
        self,
        kind: Literal["reset", "reboot"],
        order: str,
        reason: str,
        until: datetime,
        on_wait: Callable[[], None],
        *,
        power: bool,
        reboots: int,
    ) -> PermitAnswered | WaitEnded | None:
        """Ask for a permit for one order, and wait for the answer.

        Args:
            kind: The kind that the fleet's limits apply to.
            order: The order in words.
            reason: Why it is needed.
            until: When a missing answer counts as a refusal.
            on_wait: Called when the wait begins.
            power: Whether the reboot is a power cycle.
            reboots: Known recent reboots of this node.

        Returns:
            None: the order may be given now. WaitEnded: another event has arrived and comes first.
        """
        asked_at = workflow.now()
        if self._take_late_permit(order):
            return None
        waiting_for = f"waiting for a permit of fleet {self._repair.fleet} to {order}"
        permit = await self._request(
            kind, reason, until, waiting_for, on_wait, power=power, reboots=reboots
        )
        if permit is not None and permit.allowed:
            self._unused = permit.at
        if self._is_interrupted():
            return WaitEnded()
        if permit is None:
            return PermitAnswered(False, f"it did not answer by {until:%H:%M} UTC")
        if not permit.allowed:
            return PermitAnswered(False, permit.reason)
        if workflow.now() - asked_at <= MAX_PERMIT_DELAY:
            return None
        now = workflow.now()
        given = now if permit.at is None else permit.at
        self._late_permit = LatePermit(order, now + LATE_PERMIT_TTL, given + LATE_PERMIT_TTL)
        return PermitAnswered(True, permit.reason)

    def note_order(self) -> None:
        """The order that was permitted last was given."""
        self._unused = None

    async def find_refusal(self, reason: str, on_wait: Callable[[], None]) -> str:
        """Ask the fleet why it would not permit a repair that the node has already refused.

        Returns an empty string if it would, or if no answer comes in time.
        """
        repair, until = self._repair, workflow.now() + SEND_TIMEOUT
        waiting_for = f"waiting for fleet {repair.fleet} to name the jobs that use {repair.node}"
        permit = await self._request("reset", reason, until, waiting_for, on_wait)
        return permit.reason if permit is not None and not permit.allowed else ""

    def receive(self, message: Any) -> None:
        """Take an answer; ignore one that does not belong to the open request."""
        try:
            permit = PERMIT.validate_python(bound_message(message, MAX_TEXT))
        except ValueError as error:
            workflow.logger.info("a permit cannot be read: %s", explain(error))
            return
        if (
            permit.run == workflow.info().run_id
            and permit.seq == self._seq
            and self._answer is None
        ):
            self._answer = permit

    def _take_late_permit(self, order: str) -> bool:
        """Return whether a permit for this order came late and is still valid; use it up."""
        late, self._late_permit = self._late_permit, None
        return late is not None and late.is_valid(order)

    async def _request(
        self,
        kind: Literal["reset", "reboot"],
        reason: str,
        until: datetime,
        waiting_for: str,
        on_wait: Callable[[], None],
        *,
        power: bool = False,
        reboots: int = 0,
    ) -> Permit | None:
        """Send a request until it is answered, the time is over, or another event arrives."""
        repair, info = self._repair, workflow.info()
        self._answer = None
        self._seq += 1
        request = PermitRequest(
            info.workflow_id,
            info.run_id,
            self._seq,
            repair.node,
            kind,
            reason,
            workflow.now(),
            power=power,
            restarts=reboots,
            job=repair.job,
            nonce=repair.proof.nonce[:64] if repair.proof is not None else "",
            renews=self._unused,
        )
        self.waiting_for = f"{waiting_for}, until {until:%Y-%m-%d %H:%M:%S} UTC"
        on_wait()
        while self._answer is None and not self._is_interrupted():
            left = until - workflow.now()
            if left <= timedelta(0):
                break
            await self._send("repair_wanted", request, min(SEND_TIMEOUT, left))
            await self._wait_for_answer(until)
        self.waiting_for = ""
        return self._answer

    async def _wait_for_answer(self, until: datetime) -> None:
        left = max(timedelta(0), min(RESEND_INTERVAL, until - workflow.now()))
        with suppress(TimeoutError):
            await workflow.wait_condition(
                lambda: self._answer is not None or self._is_interrupted(),
                timeout=left,
                timeout_summary=f"wait for a permit of fleet {self._repair.fleet}",
            )

    async def _send(
        self,
        signal: Literal["repair_began", "repair_wanted", "repair_ended"],
        message: RepairStart | PermitRequest | RepairResult,
        timeout: timedelta,
    ) -> None:
        """Send a message. A fleet that does not accept it in time does not stop the repair."""
        fleet = self._repair.fleet
        try:
            await workflow.execute_activity_method(
                FleetActivities.tell_fleet,
                TellFleetInput(fleet, signal, message),
                start_to_close_timeout=min(SEND_ATTEMPT_TIMEOUT, timeout),
                schedule_to_close_timeout=timeout,
                retry_policy=KEEP_TRYING,
                summary=f"send {signal} to fleet {fleet}",
            )
        except ActivityError as error:
            cause = error.cause or error
            workflow.logger.warning("fleet %s did not accept %s: %s", fleet, signal, cause)
